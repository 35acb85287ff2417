"""`canaryd demo`: a real engine, the daemon beside it, and faults injected from the engine's side of memory."""
