"""The process of one device: maps pools, runs bursts, and feeds the pure core with the real world."""
