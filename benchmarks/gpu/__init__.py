"""The GPU's table: every kernel checked against its reference, then timed beside a read ceiling of the same run."""
