"""Every metric: its name and help, the totals behind it, and the collector that renders it."""
