"""The engine side: begin, end, snapshot; never blocks and never raises into the engine."""

from canaryd.client.client import NO_OP, Client, ClientStats
from canaryd.client.columns import Ints, column
from canaryd.client.facts import Final, SnapshotState, page_set, row_open
from canaryd.client.memory import ExportedMemory, export_cuda_tensor, export_host_tensor
from canaryd.client.sender import Timing

__all__ = [
    "NO_OP",
    "Client",
    "ClientStats",
    "ExportedMemory",
    "Final",
    "Ints",
    "SnapshotState",
    "Timing",
    "column",
    "export_cuda_tensor",
    "export_host_tensor",
    "page_set",
    "row_open",
]
