"""Triton kernels run under the interpreter on host tensors, except where a GPU is asked for.

Triton decides when a kernel is decorated, so the switch must be set before any device module is imported.
"""

from __future__ import annotations

import os

if os.environ.get("CANARYD_TEST_GPU") != "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")
