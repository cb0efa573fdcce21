"""Training at the shorter blocks that a policy may ask for (ForeSpark): masks read each other, so that a short block is
not the beginning of a long one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from ...training.records import Unrolled
from .unroll_block import Blocks, Reading, unroll_plain


def check(share: float = 0.5) -> None:
    """Raise ValueError for a value that `unroll` has no use for."""
    if not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"unroll.mode.share is a share, from 0 to 1, got {share!r}")


def unroll(reading: Reading, generator: torch.Generator | None, share: float = 0.5) -> Unrolled:
    """In training, a share of the batches in blocks of one of `config.short_blocks`, drawn once per batch. Evaluation,
    and all other batches, in full blocks.

    Raises ValueError for drafters without short blocks.
    """
    config = reading.drafter.config
    if not config.short_blocks:
        raise ValueError("unroll.mode short trains a drafter at shorter blocks; set drafter.short_blocks")
    if not reading.drafter.training or float(torch.rand((), generator=generator)) >= share:
        return unroll_plain(reading, generator)
    size = config.short_blocks[int(torch.randint(len(config.short_blocks), (), generator=generator))]
    blocks = Blocks.at(reading.batch, reading.blocks.columns, reading.blocks.real, size)
    short = Reading(reading.drafter, reading.view, reading.batch, blocks)
    hidden = short.states(short.masked())
    drafts = hidden.shape[1]
    unrolled = short.unrolled(F.pad(hidden, (0, 0, 0, config.num_drafts - drafts)))
    return replace(unrolled, mask=unrolled.mask & (torch.arange(config.num_drafts, device=hidden.device) < drafts))
