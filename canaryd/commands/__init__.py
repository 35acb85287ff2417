"""What the command line does: each module one command, and how its answer looks in a terminal."""
