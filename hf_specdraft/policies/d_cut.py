"""D-Cut (arXiv 2607.14647): how much of a batch's drafts is worth verifying."""

from __future__ import annotations

import math
from pathlib import Path

from ..draft import Draft
from .base import Situation
from .budgets import Budgeted, Growth, prefixes, ranked, shortened


def kept_drafts(rows: int, width: int, ratio: float) -> int:
    """How many drafted tokens a keep ratio leaves: it counts all tokens of the pass, `width` a row with the anchor, and
    every row's anchor stays."""
    return min(rows * (width - 1), max(0, math.ceil(round(rows * width * ratio, 9)) - rows))


class DCut(Budgeted):
    """Verifies only the likeliest of a batch's drafted tokens, as many as are accepted fastest.

    A ratio keeps the `kept_drafts` likeliest tokens of all rows; finished ones count for nothing but the price. Of the
    `ratios`, the one with the most accepted tokens per second is taken; where the pass is a rectangle, what fits in it
    besides is verified, too.

    mode: "auto", or one ratio for all rounds, in (0, 1].
    ratios: those that "auto" weighs.
    min_saving: no cut where the cheapest ratio saves less than this share of the whole pass.
    counts_anchors: whether the token that every row gets anyway counts as well; for calibrated confidences (others are
        too sure of themselves, which would favour shallow cuts).
    What it looks at: all tokens of the drafts, unless their confidences look at none ("prior"). Drawn rows become point
    rows then.
    """

    name = "d_cut"

    def __init__(
        self,
        situation: Situation,
        mode: str | float = "auto",
        ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0),
        min_saving: float = 0.12,
        counts_anchors: bool = False,
        prices: str | Path | None = None,
        packed: bool = False,
    ):
        super().__init__(situation, prices, packed)
        self.ratios = sorted(ratios) if mode == "auto" else [mode]
        self.min_saving, self.counts_anchors = min_saving, counts_anchors

    @staticmethod
    def check(mode: str | float, ratios: tuple[float, ...], **others) -> None:
        if mode != "auto" and (isinstance(mode, (str, bool)) or not 0 < mode <= 1):
            raise ValueError(f"policy d_cut: mode must be 'auto' or a ratio in (0, 1], got {mode!r}")
        if not ratios or any(not 0 < ratio <= 1 for ratio in ratios):
            raise ValueError(f"policy d_cut: ratios must be in (0, 1], got {ratios!r}")

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        if draft.confidence is None or not draft.shape[1]:
            return draft
        survival, rank = ranked(draft)
        growth = Growth(survival, self.prices.packed)
        step = self._step(growth, sum(going))
        return shortened(draft, rank, growth.lengths(step), looked_at_token=draft.confidence_kind != "prior")

    def _step(self, growth: Growth, going: int) -> int:
        rows, width = growth.survival.shape
        steps = [self._of_ratio(growth, kept_drafts(going, 1 + width, ratio)) for ratio in self.ratios]
        if len(steps) == 1:
            return steps[0]
        seconds = [self.prices.verify(rows, growth.nodes(step), self.context) for step in steps]
        if min(seconds) > (1 - self.min_saving) * self.prices.verify(rows, growth.nodes(len(growth) - 1), self.context):
            return len(growth) - 1
        anchors = going if self.counts_anchors else 0
        rates = [(anchors + growth.expected[step]) / s for step, s in zip(steps, seconds)]
        return steps[max(range(len(steps)), key=rates.__getitem__)]

    @staticmethod
    def _of_ratio(growth: Growth, count: int) -> int:
        count = min(count, int(growth.counts.sum()))
        return count if growth.packed else max(prefixes(growth.survival, count), default=0)
