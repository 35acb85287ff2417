"""The engine side: begin, end, snapshot; never blocks and never raises into the engine."""
