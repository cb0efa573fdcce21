"""Tree attention as a Triton kernel: streaming softmax (FlashAttention, 2205.14135), columns split over programs.

A tree has few rows, so the rows of all query heads that share a key head are stacked into one tile (keys and values are
read once, not once per query head), and the columns are cut into parts that run side by side (as in Flash-Decoding), or
one long context would leave most of the GPU idle. The parts are joined in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = 256  # bytes of a head beyond which the loop takes smaller steps, to fit shared memory
_MIN_PART = 256  # columns a part should have at least: below, joining costs more than it gains
_PROGRAMS = 512  # programs to aim for: a few for each multiprocessor of a large GPU


@triton.jit
def _attend(
    query,
    key,
    value,
    mask,
    out,
    log_total,
    query_b,
    query_h,
    query_n,
    query_d,
    key_b,
    key_h,
    key_c,
    key_d,
    value_b,
    value_h,
    value_c,
    value_d,
    mask_b,
    mask_n,
    mask_c,
    scale,
    key_heads,
    group,
    rows,
    columns,
    part,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One part of the columns for one tile of the stacked rows of one key head."""
    head = tl.program_id(0).to(tl.int64)
    b = head // key_heads
    h = head % key_heads
    stacked = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]: query heads of the group, then nodes
    live = stacked < group * rows
    n = stacked % rows
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    query_row = query + b * query_b + (h * group + stacked // rows) * query_h + n * query_n  # [R]
    q = tl.load(query_row[:, None] + d[None, :] * query_d, mask=live[:, None] & (d < D)[None, :], other=0.0)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    weighted = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    first = tl.program_id(2) * part
    last = tl.minimum(first + part, columns)
    for start in range(first, last, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C).to(tl.int64)
        inside = c < last
        k = tl.load(
            key + b * key_b + h * key_h + c[None, :] * key_c + d[:, None] * key_d,
            mask=inside[None, :] & (d < D)[:, None],
            other=0.0,
        )  # [D, C]
        v = tl.load(
            value + b * value_b + h * value_h + c[:, None] * value_c + dv[None, :] * value_d,
            mask=inside[:, None] & (dv < DV)[None, :],
            other=0.0,
        )  # [C, DV]
        seen = tl.load(
            mask + b * mask_b + n[:, None] * mask_n + c[None, :] * mask_c,
            mask=live[:, None] & inside[None, :],
            other=0,
        )  # [R, C]
        # "ieee": the default for float32 is TF32, whose ten bits of mantissa flip near-ties against plain decoding.
        scores = tl.where(seen != 0, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows that have seen nothing yet
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(weights, 1)
        weighted = weighted * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    some = total > 0
    place = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + head) * (group * rows) + stacked  # [R]
    tl.store(log_total + place, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=live)
    tl.store(
        out + place[:, None] * DV + dv[None, :],
        weighted / tl.where(some, total, 1.0)[:, None],
        mask=live[:, None] & (dv < DV)[None, :],
    )


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See `hf_specdraft.kernels.tree_attention`."""
    batch, query_heads, rows, width = query.shape
    key_heads, columns, value_width = key.shape[1], key.shape[2], value.shape[-1]
    group = query_heads // key_heads
    mask = mask.expand(batch, 1, rows, columns).view(torch.uint8)
    block_rows = min(64, max(16, triton.next_power_of_2(group * rows)))
    block_columns, stages = (32, 2) if width * query.element_size() > _WIDE else (64, 3)
    tiles = triton.cdiv(group * rows, block_rows)
    wanted = triton.cdiv(_PROGRAMS, batch * key_heads * tiles)
    part = max(_MIN_PART, triton.cdiv(triton.cdiv(columns, wanted), block_columns) * block_columns)
    parts = triton.cdiv(columns, part)
    out = query.new_empty(parts, batch, query_heads, rows, value_width, dtype=torch.float32)
    log_total = query.new_empty(parts, batch, query_heads, rows, 1, dtype=torch.float32)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _attend[(batch * key_heads, tiles, parts)](
            query,
            key,
            value,
            mask,
            out,
            log_total,
            *query.stride(),
            *key.stride(),
            *value.stride(),
            mask.stride(0),
            *mask.stride()[2:],
            scale,
            key_heads,
            group,
            rows,
            columns,
            part,
            D=width,
            DV=value_width,
            BLOCK_R=block_rows,
            BLOCK_C=block_columns,
            BLOCK_D=max(16, triton.next_power_of_2(width)),
            BLOCK_DV=max(16, triton.next_power_of_2(value_width)),
            num_stages=stages,
        )
    if parts == 1:
        return out[0].to(query.dtype)
    # exp of the difference to the joint total; a row that no part saw has -inf everywhere and stays zero.
    joint = log_total.logsumexp(0).nan_to_num(neginf=0.0)
    return ((log_total - joint).exp() * out).sum(0).to(query.dtype)
