"""The process that owns sockets, HTTP, findings and workers. It never touches CUDA and does not import torch."""
