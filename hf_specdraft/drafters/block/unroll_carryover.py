"""Carryover's training (2609.14717): draft, let the target verify, and draft again with the rejected rows at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import walkers
from ...draft import Block, Context
from ...training.anchors import following
from ...training.records import Unrolled
from ...verification import argmax
from .branches import at_blocks, branch_pass
from .unroll_block import Blocks, Reading, unroll_plain

# float32 logits that exist at a time while the first drafts are taken from them.
LOGITS = 2**24


def unroll(reading: Reading, generator: torch.Generator | None, dropout: float = 0.1) -> Unrolled:
    """The second draft of each anchor: where a round ends that began at the anchor, along the text.

    The first draft is made without gradient; the target verifies it as a branch of the text (`batch.verify`). As many
    tokens as the target would accept, and one more, are taken from the text, which plays the true continuation; there
    the second draft starts, with the rejected rows beside the text's context. Anchors whose text ends before that have
    none. In evaluation (a drafter not in training mode) each anchor starts a first draft, as a text has no rounds.

    dropout: share of the second drafts whose rejected rows are left out, so that drafting without any stays learnt.
    Raises ValueError for drafters without `carryover`, and without a target at hand.
    """
    drafter, config, batch, blocks = reading.drafter, reading.drafter.config, reading.batch, reading.blocks
    if not drafter.training:
        return unroll_plain(reading, generator)
    if not config.carryover:
        raise ValueError("unroll.mode carryover trains a drafter that reads rejected rows; set drafter.carryover: true")
    if batch.verify is None:
        raise ValueError("unroll.mode carryover verifies drafts with the target; give the batch one (batch.verify)")
    with torch.no_grad():
        hidden = reading.states(reading.masked())
        drafts = blocks.columns.new_zeros(*blocks.real.shape, config.num_drafts)
        drafts[blocks.real] = _drafted(reading, hidden)
        features, choices = batch.verify(batch, blocks.columns, drafts)
    accepted = (choices[..., :-1] == drafts).long().cumprod(2).sum(2)  # [B, A]
    width = batch.input_ids.shape[1]
    starts = (torch.arange(len(drafts), device=drafts.device)[:, None] * width + blocks.columns).flatten()
    _, _, there = following(batch, starts, config.num_drafts + 1)
    real = there.view(*accepted.shape, -1).gather(2, accepted[..., None])[..., 0] & blocks.real
    second = Blocks.at(batch, (blocks.columns + accepted + 1).where(real, 0), real, blocks.size)
    order = torch.arange(config.num_drafts, device=real.device)
    rejected = order >= accepted[..., None]
    if dropout:
        kept = torch.rand(real.shape, generator=generator).to(real.device) >= dropout
        rejected = rejected & kept[..., None]
    begun = batch.position_ids.gather(1, blocks.columns)
    rows = (begun[..., None] + 1 + order).where(rejected & real[..., None], -1)
    positions = torch.cat((batch.position_ids, rows.flatten(1)), dim=1)
    hidden, context = branch_pass(
        reading,
        second,
        second.anchors[:, :: blocks.size],
        rows,
        features=torch.cat((batch.features, features.flatten(1, 2).to(batch.features)), dim=1).to(drafter.dtype),
        feature_positions=positions,
        carried=torch.arange(positions.shape[1], device=real.device).expand_as(positions) >= width,
    )
    reading = at_blocks(reading, second)
    reading.fused = context[:, :width]
    return reading.unrolled(hidden)


def _drafted(reading: Reading, hidden: Tensor) -> Tensor:
    """[n, S] tokens drafted greedily at the n real blocks; by the marginals where a corrector reads the context."""
    drafter, view, corrector = reading.drafter, reading.view, reading.drafter.corrector
    if corrector is not None and corrector.memory(1) is not None:
        corrector = None
    anchors, size = reading.masked()[reading.blocks.real][:, 0], hidden.shape[1]
    step, tokens = max(1, LOGITS // (size * view.vocab_size)), [anchors.new_zeros(0, size)]
    for some in (slice(start, start + step) for start in range(0, len(hidden), step)):
        logits = drafter.logits(view, hidden[some])
        if corrector is None:
            tokens.append(drafter.target_ids(argmax(logits)))
            continue
        block, lengths = Block(logits, drafter.draft_ids, hidden[some], anchors[some]), [size] * len(logits)
        context = Context(block.anchor, [0] * len(logits), lengths, size)
        tokens.append(walkers.chain(drafter, view, corrector, block, context, lengths).tokens)
    return torch.cat(tokens)
