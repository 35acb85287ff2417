"""Running bursts on a pool: device state, staging, chunks, and the self-test of the same kernels."""
