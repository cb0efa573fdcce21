"""Loop-aware training (DLoop, 2610.07659): a draft's later blocks read the drafter's own states of earlier ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...training.records import Unrolled
from .branches import Beside, at_blocks, branch_pass
from .unroll_block import Blocks, Reading
from .unroll_edit import shared_chance


def unroll(
    reading: Reading, generator: torch.Generator | None, stages: int | None = None, detach: bool = True
) -> Unrolled:
    """The first and the last of 1 to `stages` blocks one behind the other at each anchor, each with half the weight.

    Every block starts at the text's own token. A later one sees the text's context before the first anchor, and as rows
    of what lies between the states that the earlier blocks gave; it exists where all of that was to be drafted. How
    many stages is drawn once per batch on all processes (the paper draws per anchor: the same loss on average, in fewer
    passes).
    Metrics are about the first block, which evaluation (a drafter not in training mode) makes alone.

    stages: config.max_stages by default. detach: whether a block's states are cut off from the loss of later ones.
    Raises ValueError for drafters of one stage.
    """
    config = reading.drafter.config
    if config.max_stages < 2:
        raise ValueError("unroll.mode loop trains a drafter of several stages; set drafter.max_stages above 1")
    most = config.max_stages if stages is None else stages
    count = 1 + int(most * shared_chance(generator)) if reading.drafter.training else 1
    hidden = reading.states(reading.masked())
    first = last = reading.unrolled(hidden)
    if count == 1:
        return first
    batch, size, blocks = reading.batch, config.num_drafts, reading.blocks
    limits = batch.position_ids.gather(1, blocks.columns).where(blocks.real, 0)
    own, at = [], []  # of each stage so far: its states [B, A, S, H], and their positions [B, A, S]
    for stage in range(1, count):
        states = hidden.new_zeros(*blocks.real.shape, *hidden.shape[1:])
        states[blocks.real] = hidden.detach() if detach else hidden
        own.append(states)
        at.append(blocks.anchors[:, :: blocks.size, None] + 1 + torch.arange(size, device=limits.device))
        real = blocks.real.clone()
        real[blocks.real] = last.mask.all(1)
        blocks = Blocks.at(batch, (blocks.columns + size).where(real, 0), real, blocks.size)
        # The new anchor has no row.
        rows = torch.cat(own, dim=2)[:, :, :-1]
        positions = torch.cat(at, dim=2)[:, :, :-1].where(real[..., None], -1)
        made = torch.arange(stage, device=limits.device).repeat_interleave(size)[:-1]
        hidden, _ = branch_pass(
            reading,
            blocks,
            limits,
            positions,
            own_states=rows.flatten(1, 2),
            stages=made.repeat(rows.shape[1]),
            feature_positions=positions.flatten(1),
            cache=Beside(reading),
        )
        last = at_blocks(reading, blocks).unrolled(hidden)
    drafts = torch.arange(len(first.mask) + len(last.mask), device=limits.device) < len(first.mask)
    # What parts read of the context ends where the draft began.
    begun = first.anchors.new_zeros(blocks.real.shape)
    begun[reading.blocks.real] = first.anchors
    last = replace(last, anchors=begun[blocks.real])
    joined = {
        name: torch.cat((getattr(first, name), getattr(last, name)))
        for name in ("hidden", "labels", "rows", "mask", "anchors", "previous")
    }
    return replace(first, **joined, weight=torch.full(drafts.shape, 0.5, device=limits.device), drafts=drafts)
