"""Between supervisor and worker: messages, and the channel that carries them and file descriptors."""
