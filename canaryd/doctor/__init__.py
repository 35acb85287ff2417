"""`canaryd doctor`: whether this machine and container let canaryd work, and how to fix what does not."""
