"""What the doctor looks at: plain values, so that every judgement can be tested."""

from __future__ import annotations

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the management library shows it. `compute_mode`: default, exclusive_process or prohibited; None: the
    GPU does not say."""

    uuid: str
    name: str = ""
    compute_mode: str | None = None
    ecc: bool | None = None


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of the configuration; `mode` its permission bits, `owner` a user id; None: it is not there."""

    path: str
    mode: int | None = None
    owner: int | None = None
    is_folder: bool = False
    writable: bool = False
    free_bytes: int = 0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at once.

    `gpus` or `gpus_error`; `cuda_uuids` (what a CUDA process sees) or `cuda_error`; `ipc_error` is "" if memory of one
    process could be opened by another, None if it was not tried. `hidden_engines`: attached engines whose process this
    PID namespace does not show; None: no daemon was there to ask.
    """

    user: int
    packages: dict[str, str | None]
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_error: str | None = None
    cuda_uuids: tuple[str, ...] = ()
    cuda_error: str | None = None
    ipc_error: str | None = None
    mps: bool = False
    socket_dir: Folder
    state_dir: Folder
    is_first_process: bool = False
    hidden_engines: tuple[str, ...] | None = None
    compiler: bool = True
    cache_writable: bool = True
