"""What an editor's passes do to drafts: how often they change a token, and how often that helps or harms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafters.base import TargetView
from ..drafters.block import BlockDrafter
from ..drafters.block.editing import calibrated_shift, log_odds
from ..drafters.block.unroll_block import Blocks, Reading
from ..drafters.block.unroll_edit import refined, reread, said
from ..training.anchors import choose_anchors
from ..training.records import TrainingBatch


@dataclass
class EditStatistics:
    """What became of the first pass's drafts, `drafts` of them, at the anchors of texts that the target wrote.

    edited: of slots, those whose token changed. repaired, broken: of slots, those that became the text's token, and
        those that were it. helpful, harmful: of drafts, those whose accepted prefix became longer, and shorter.
    before, after: mean length of the accepted prefix.
    """

    drafts: int
    edited: float
    repaired: float
    broken: float
    helpful: float
    harmful: float
    before: float
    after: float


@torch.no_grad()
def edit_statistics(
    drafter: BlockDrafter, view: TargetView, batches: Iterable[TrainingBatch], anchors: int | None = None
) -> EditStatistics:
    """Measure the edits that `drafter.config` makes (edit_passes, edit_gate), best tokens throughout, as in greedy
    decoding.

    batches: with features. anchors: at most so many of each document, None for all. Raises ValueError where nothing is
    drafted.
    """
    slots, counts = torch.zeros(4), torch.zeros(5)
    for reading in _readings(drafter, view, batches, anchors):
        first = reading.states(reading.masked())
        text = reading.unrolled(first)
        tokens = [drafter.target_ids(said(reading, hidden)[0]) for hidden in (first, refined(reading).state[0])]
        right = [(row == text.labels) & text.mask for row in tokens]
        before, after = (row.long().cumprod(1).sum(1) for row in right)
        changed = (tokens[0] != tokens[1]) & text.mask
        slots += _sums(text.mask, changed, right[1] & changed, right[0] & changed)
        counts += _sums(torch.ones_like(before), after > before, after < before, before, after)
    if not counts[0]:
        raise ValueError("the texts hold no token to draft: give some that the target wrote")
    every, drafts = slots[0].item(), counts[0].item()
    return EditStatistics(
        int(drafts), *(value.item() / every for value in slots[1:]), *(value.item() / drafts for value in counts[1:])
    )


@torch.no_grad()
def calibrate_cavity(
    drafter: BlockDrafter, view: TargetView, batches: Iterable[TrainingBatch], anchors: int | None = None
) -> list[float]:
    """`CavityGate.shift` for a drafter, by what its second pass says of its first drafts on held-out texts."""
    odds, correct, masks = [], [], []
    for reading in _readings(drafter, view, batches, anchors):
        hidden = reading.states(reading.masked())
        text, (best, _, _) = reading.unrolled(hidden), said(reading, hidden)
        tokens = drafter.target_ids(best)
        # A few drafts at a time: what they say is as wide as the vocabulary.
        for states, index in zip(reread(reading, tokens).split(64), best.split(64)):
            odds.append(log_odds(drafter.logits(view, states), index))
        correct.append(tokens == text.labels)
        masks.append(text.mask)
    return calibrated_shift(torch.cat(odds), torch.cat(correct), torch.cat(masks))


def _readings(drafter: BlockDrafter, view: TargetView, batches: Iterable[TrainingBatch], anchors: int | None):
    for batch in batches:
        batch = batch.to(drafter.device)
        yield Reading(drafter, view, batch, Blocks.of(batch, choose_anchors(batch, anchors), drafter.config.block_size))


def _sums(*values: Tensor) -> Tensor:
    return torch.stack([value.sum().float().cpu() for value in values])
