"""Messages, framing, sockets and the announce page."""
