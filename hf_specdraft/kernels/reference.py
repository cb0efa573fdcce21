"""The definition of both operations, slow and obvious, in float64. See `hf_specdraft.kernels` for the contracts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..draft import Law

# A residual of this mass or less is rounding; `verification.residual` draws the line there for float32.
VANISHED = 8 * torch.finfo(torch.float32).eps


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, query_heads, rows, _ = query.shape
    group = query_heads // key.shape[1]
    mask = mask.expand(batch, 1, rows, key.shape[2])
    out = query.new_zeros(batch, query_heads, rows, value.shape[-1])
    for b in range(batch):
        for h in range(query_heads):
            for n in range(rows):
                seen = mask[b, 0, n]
                if seen.any():
                    scores = key[b, h // group, seen].double() @ query[b, h, n].double() * scale  # [seen]
                    out[b, h, n] = (scores.softmax(0) @ value[b, h // group, seen].double()).to(out.dtype)
    return out


def verify_chain(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    greedy: bool,
    temperature: float,
    law: Law | None,
    accept_uniforms: Tensor | None,
    emit_uniforms: Tensor | None,
) -> tuple[Tensor, Tensor]:
    accepted = torch.zeros_like(lengths)
    next_token = torch.zeros_like(lengths)
    for b, length in enumerate(lengths.tolist()):
        if greedy:
            choice = [_first_argmax(row) for row in logits[b, : length + 1].double()]
            count = 0
            while count < length and choice[count] == tokens[b, count]:
                count += 1
            accepted[b], next_token[b] = count, choice[count]
            continue
        p = (logits[b, : length + 1].double() / temperature).softmax(-1)  # [length + 1, V]
        weights = p[length]
        for i in range(length):
            x = tokens[b, i]
            q = torch.zeros_like(p[i])
            if law is not None and law.rows[b]:
                ids = torch.arange(law.probs.shape[-1], device=q.device) if law.ids is None else law.ids[b, i]
                q.index_add_(0, ids, law.probs[b, i].double())
            else:
                q[x] = 1
            if q[x] == 0 or accept_uniforms[b, i].double() * q[x] >= p[i, x]:
                residual = (p[i] - q).clamp(min=0)
                weights = residual if residual.sum() > VANISHED else p[i]
                break
            accepted[b] += 1
        cumulated = weights.cumsum(0)
        exceeding = (cumulated > emit_uniforms[b].double() * cumulated[-1]).nonzero()
        next_token[b] = exceeding[0, 0]
    return accepted, next_token


def _first_argmax(row: Tensor) -> int:
    return int((row == row.max()).nonzero()[0, 0])
