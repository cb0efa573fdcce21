"""Which hidden states of the target a drafter reads, and cutting them down to what was committed."""

from __future__ import annotations

import torch
from torch import Tensor

from .draft import Features


def selected(hidden_states: tuple, layers: tuple[int, ...], device: torch.device) -> Tensor:
    """[B, W, n*H] outputs of `layers` (zero-based; -1 is the embedding), concatenated in that order.

    hidden_states: one entry per layer and the embedding, None where it was not asked for.
    """
    return torch.cat([hidden_states[layer + 1].to(device) for layer in layers], dim=-1)


def of_prompt(hidden: Tensor, past: int, mask: Tensor | None) -> Features:
    """Features of a prefill behind `past` columns of a cache; mask: [B, past + W] 2-D attention mask, or None."""
    batch, width = hidden.shape[:2]
    if mask is None:
        return Features(hidden, [width] * batch, [past] * batch)
    live = mask[:, past:].bool().to(hidden.device)
    # Real tokens first, in their order.
    index = (~live).long().argsort(dim=1, stable=True)
    hidden = hidden.gather(1, index[..., None].expand_as(hidden))
    return Features(hidden, live.sum(1).tolist(), mask[:, :past].sum(1).tolist())


def of_path(hidden: Tensor, kept: list[list[int]], start: list[int]) -> Features:
    """Features of one round: the pass's columns that stay, per row; `start` is the position of the anchor."""
    counts = [len(offsets) for offsets in kept]
    width = max(counts)
    if all(offsets == list(range(width)) for offsets in kept):
        return Features(hidden[:, :width], counts, start)
    index = torch.tensor([offsets + [0] * (width - len(offsets)) for offsets in kept], device=hidden.device)
    return Features(hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1])), counts, start)


def of_rejected(hidden: Tensor, kept: list[list[int]], nodes: list[int], start: list[int]) -> Features:
    """Features of the columns of a round's pass over chains that do not stay, per row: those behind the kept ones, up
    to the last of its `nodes`; none of a row that keeps nothing, because it had finished."""
    first = [len(offsets) for offsets in kept]
    counts = [max(0, 1 + n - k) if k else 0 for n, k in zip(nodes, first)]
    column = torch.arange(max(counts)) + torch.tensor(first)[:, None]
    column = column.clamp_(max=hidden.shape[1] - 1).to(hidden.device)
    return Features(hidden.take_along_dim(column[..., None], 1), counts, [s + k for s, k in zip(start, first)])
