"""The scatter kernel in Triton, and its launch; the arguments are those of the launcher, already checked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from canary_kernels.device.search import find_owner

_BLOCK = 256


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "bs",
        "max_rows",
        "width",
        "flat_stride",
        "offsets_stride",
        "pool_indices_stride",
        "row_stride",
        "column_stride",
    ]
)
def scatter_kernel(
    flat_in,
    offsets,
    pool_indices,
    pool_out,
    num_tokens: tl.int64,
    bs: tl.int64,
    max_rows: tl.int64,
    width: tl.int64,
    flat_stride: tl.int64,
    offsets_stride: tl.int64,
    pool_indices_stride: tl.int64,
    row_stride: tl.int64,
    column_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    """pool_out[pool_indices[r], t - offsets[r]] = flat_in[t], r the last request with offsets[r] <= t.

    A tile of tokens per program; each lane finds its request by binary search. Reads ids, offsets and rows, writes ids.

    Floor: 8 bytes read and 4 written per token.
    """
    bs = bs.to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = (t < num_tokens) & (t >= tl.load(offsets)) & (t < tl.load(offsets + bs * offsets_stride))
    r = find_owner(offsets, offsets_stride, bs, t, mask)
    row = tl.load(pool_indices + r * pool_indices_stride, mask=mask, other=-1)
    column = t - tl.load(offsets + r * offsets_stride, mask=mask, other=0)
    # offsets that are not sorted can make the difference wrap
    keep = mask & (column >= 0) & (column < width) & (row >= 0) & (row < max_rows)
    token = tl.load(flat_in + t * flat_stride, mask=keep, other=0).to(tl.int32)
    tl.store(pool_out + row * row_stride + column * column_stride, token, mask=keep)


def run_scatter(
    *, flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    """See `launch_scatter_req_token_ids_kernel`."""
    num_tokens = flat_in.shape[0]
    bs = req_pool_indices.shape[0]
    if bs == 0 or num_tokens == 0:
        return
    scatter_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        flat_in,
        offsets,
        req_pool_indices,
        pool_out,
        num_tokens,
        bs,
        pool_out.shape[0],
        pool_out.shape[1],
        flat_in.stride(0),
        offsets.stride(0),
        req_pool_indices.stride(0),
        pool_out.stride(0),
        pool_out.stride(1),
        BLOCK=_BLOCK,
    )
