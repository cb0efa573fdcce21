"""What policies that spend a batch's budgets have in common: growing passes, and what they promise and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..draft import Draft
from ..trees import prune
from .base import AsAsked, Situation
from .costs import prices_of


def admission(survival: Tensor) -> Tensor:
    """[M, 2] (row, place) of the real entries of [R, N] falling survivals (negative where there is no entry), likeliest
    first: every row's are admitted from its first on.

    Of equally likely ones the shallower comes first, then the earlier row: no entry's place in the order depends on
    what only its own token, or a later one, can tell (DSpark 2607.05147, appendix A).
    """
    rows, places = survival.shape
    by_place = survival.T.flatten()
    order = by_place.argsort(descending=True, stable=True)
    order = order[by_place[order] >= 0]
    return torch.stack((order % rows, order // rows), dim=1)


def prefixes(survival: Tensor, count: int) -> list[int]:
    """How many entries of each row are among the `count` likeliest of all."""
    return torch.bincount(admission(survival)[:count, 0], minlength=len(survival)).tolist()


class Growth:
    """The ways to verify more and more of R rows' drafts, step by step.

    survival: [R, N] on the CPU, falling along each row: the chance that the first 1, 2, ... nodes are accepted;
        negative where a row has no more.
    packed: each step adds the likeliest entry of all. Otherwise the pass is a rectangle, in which only its width costs:
        each step adds a column.
    expected: per step, how many nodes are accepted of those verified. depths: per step, those of the longest row.
    """

    def __init__(self, survival: Tensor, packed: bool):
        self.packed = packed
        self.survival = survival.double()
        self.counts = (survival >= 0).sum(1)
        if packed:
            order = admission(self.survival)
            gains, deepest = self.survival[order[:, 0], order[:, 1]], (1 + order[:, 1]).cummax(0).values
        else:
            width = max(self.counts.tolist(), default=0)
            gains, deepest = self.survival[:, :width].clamp(min=0).sum(0), torch.arange(1, width + 1)
        self.expected = [0.0, *gains.cumsum(0).tolist()]
        self.depths = [0, *deepest.tolist()]

    def __len__(self) -> int:
        return len(self.expected)

    def lengths(self, step: int) -> list[int]:
        """Nodes verified of each row."""
        return prefixes(self.survival, step) if self.packed else self.counts.clamp(max=step).tolist()

    def nodes(self, step: int) -> float:
        """What `Prices.verify` asks for."""
        return step / max(1, len(self.counts)) if self.packed else step

    def best(self, rate: Callable[[int], float], last: int | None = None, stops_early: bool = False) -> int:
        """The step with the greatest rate, of those up to `last`; stops_early: before the first that brings no more,
        so that nothing behind an entry decides about it."""
        best, highest = 0, rate(0)
        for step in range(1, len(self) if last is None else min(last + 1, len(self))):
            value = rate(step)
            if value > highest:
                best, highest = step, value
            elif stops_early:
                break
        return best


class Budgeted(AsAsked):
    """Decides for all rows of a pass at once by measured prices.

    prices: a JSON file to read and keep the prices in, so that a seed gives one text in every process (`prices_of`).
    packed: decide as if a pass cost its tokens, whatever its shape: the papers' form, for engines that pack rows of
        unequal length. A pass of transformers is a rectangle, and by default it is priced as one.
    """

    def __init__(self, situation: Situation, prices: str | Path | None = None, packed: bool = False):
        super().__init__(situation)
        self.prices = replace(prices_of(situation, prices), packed=packed)
        self._columns, self._new = situation.columns, [1] * situation.batch

    @property
    def context(self) -> int:
        """Columns of the target's cache before the pass."""
        return self._columns + max(self._new) - 1

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        super().observe(rows, offered, committed)
        for row, tokens in zip(rows, committed):
            self._new[row] += len(tokens)


def ranked(draft: Draft) -> tuple[Tensor, Tensor]:
    """Of a draft with confidences, [B, N] each on the CPU: per row its nodes' survivals, falling, then -1 for those
    that are not there; and each node's place in that order. Parents come before their children."""
    rating = draft.confidence.detach().cpu().float().nan_to_num(0).clamp(min=0)
    if draft.is_chain:
        rating = rating.cummin(1).values  # no node outlives those before it
    survival, order = torch.where(draft.valid, rating, -1.0).sort(dim=1, descending=True, stable=True)
    return survival, order.argsort(dim=1)


def shortened(draft: Draft, rank: Tensor, lengths: list[int], looked_at_token: bool) -> Draft:
    """The draft with the first `lengths[b]` nodes of each row's `rank`."""
    kept = rank < torch.tensor(lengths)[:, None]
    if bool((kept | ~draft.valid).all()) and not looked_at_token:
        return draft
    return prune(draft, kept, looked_at_token)
