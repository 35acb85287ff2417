"""The scatter kernel in torch; the arguments are those of the launcher, already checked."""

from __future__ import annotations

import torch

from canary_kernels.reference.plan import find_owner


def run_scatter(
    *, flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    """See `launch_scatter_req_token_ids_kernel`."""
    bs = req_pool_indices.shape[0]
    if bs == 0:
        return
    tokens = torch.arange(flat_in.shape[0], device=flat_in.device)
    owner = find_owner(offsets, bs, tokens)
    rows = req_pool_indices[owner]
    columns = tokens - offsets[owner]
    keep = (tokens >= offsets[0]) & (tokens < offsets[bs])
    # offsets that are not sorted can make the difference wrap
    keep &= (columns >= 0) & (columns < pool_out.shape[1]) & (rows >= 0) & (rows < pool_out.shape[0])
    pool_out[rows[keep], columns[keep]] = flat_in[keep].to(torch.int32)
