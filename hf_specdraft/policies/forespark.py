"""ForeSpark: how long to draft and how much to verify, for all rows of a batch before they draft."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..draft import Draft
from .base import Situation
from .budgets import Budgeted, Growth, ranked, shortened


class ForeSpark(Budgeted):
    """Plans both lengths of every row before drafting, and after it verifies the most promising tokens.

    Before: of all rows' slots, sorted by the chance that a draft is accepted that far, as many are drafted and verified
    as make expected tokens per second of draft and pass greatest. None at all where plain decoding is faster. The
    chances are the drafter's (`Session.outlook`), or those of an unchanging chance per token, counted over each row's
    recent rounds.
    Trees are drafted in full.
    After: no more than was planned is verified, and less where the drafted tokens' own confidences say so. More may be
    drafted than is verified (`kappas`) where choosing among them has gained enough so far.

    kappas: how much more, of which the best is taken; 1 among them. Only with `packed`.
    explore: every so many rounds all rows draft in full, so that rows that draft little are not judged by the past.
    prior: the chance of a token before anything was counted. memory: weight of the past in the counts, per round.
    What it looks at: before drafting, past rounds only. Afterwards the drafted tokens' confidences: all of them for
    point drafts and for those that had seen no token ("prior"); of drawn rows, "pre" confidences up to the first drop,
    and "own" ones never: those verify what they drafted.
    """

    name = "forespark"

    def __init__(
        self,
        situation: Situation,
        kappas: tuple[float, ...] = (1.0, 1.25, 1.5),
        explore: int = 50,
        prior: float = 0.7,
        memory: float = 0.9,
        prices: str | Path | None = None,
        packed: bool = False,
    ):
        super().__init__(situation, prices, packed)
        self.explore, self.prior, self.memory = explore, prior, memory
        self.gains = {float(kappa): 1.0 for kappa in sorted(kappas)}  # by kappa, what choosing multiplies S by
        self._hits, self._misses = ([0.0] * situation.batch for _ in range(2))
        self._rounds = 0
        self._in_full = situation.nodes > 0
        self._plan: Growth | None = None
        self._budget: int | None = None  # steps of verification; None for all
        self._chooses = True  # whether the drafts are of a kind that `cut` may choose from

    @staticmethod
    def check(kappas: tuple[float, ...], explore: int, prior: float, memory: float, **others) -> None:
        if 1 not in kappas or min(kappas) < 1:
            raise ValueError(f"policy forespark: kappas must be at least 1, and 1 among them, got {kappas!r}")
        if explore < 1 or not 0 < prior < 1 or not 0 <= memory < 1:
            raise ValueError(
                "policy forespark: explore must be at least 1, prior and memory between 0 and 1, got "
                f"explore={explore}, prior={prior}, memory={memory}"
            )

    def before(self, rows: list[int], outlook: Callable[[], Tensor | None] = lambda: None) -> list[int]:
        limits = self.inner.before(rows)
        if self._in_full:
            return limits
        self._plan = Growth(self._survival(rows, outlook(), limits), self.prices.packed)
        self._rounds += 1
        if (self._rounds - 1) % self.explore == 0:
            self._budget = None
            return limits
        self._budget, kappa = self._best(len(rows))
        return self._plan.lengths(self._drafted(self._budget, kappa))

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        if draft.confidence is None or not draft.shape[1]:
            return draft
        drawn, kind = draft.law is not None, draft.confidence_kind
        self._chooses = not (drawn and kind == "own")
        if not self._chooses:
            return draft
        survival, rank = ranked(draft)
        growth = Growth(survival, self.prices.packed)
        if self._plan is not None:
            self._learn(survival)

        def rate(step: int) -> float:
            tokens = sum(going) + growth.expected[step]
            return tokens / self.prices.verify(len(going), growth.nodes(step), self.context)

        step = growth.best(rate, self._budget, stops_early=drawn and kind == "pre")
        # Drawn rows were chosen by nothing that their own tokens tell.
        return shortened(draft, rank, growth.lengths(step), looked_at_token=kind == "own")

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        super().observe(rows, offered, committed)
        for row, depth, tokens in zip(rows, offered, committed):
            if depth and tokens:
                accepted = len(tokens) - 1
                self._hits[row] = self.memory * self._hits[row] + accepted
                self._misses[row] = self.memory * self._misses[row] + (accepted < depth)

    def _survival(self, rows: list[int], outlook: Tensor | None, limits: list[int]) -> Tensor:
        """[R, N] chances that the first 1, 2, ... tokens are accepted, -1 beyond each row's limit."""
        if outlook is None:
            hits, misses = sum(self._hits), sum(self._misses)
            common = (hits + self.prior) / (hits + misses + 1)
            # What was not tried because a draft ended is no failure: the counts are those of tokens tried.
            chances = [(self._hits[r] + common) / (self._hits[r] + self._misses[r] + 1) for r in rows]
            outlook = torch.tensor(chances)[:, None] ** torch.arange(1, 1 + max(limits, default=0))
        outlook = outlook.detach().cpu().double().clamp(0, 1).cummin(1).values
        return outlook.where(torch.arange(outlook.shape[1]) < torch.tensor(limits)[:, None], -1.0)

    def _drafted(self, step: int, kappa: float) -> int:
        return min(len(self._plan) - 1, math.ceil(round(kappa * step, 9)))

    def _best(self, rows: int) -> tuple[int, float]:
        """The steps to verify and the kappa to draft by."""
        plan, best = self._plan, (0.0, 0, 1.0)
        kappas = self.gains if plan.packed and self._chooses else {1.0: 1.0}
        for kappa, gain in kappas.items():

            def rate(step: int, kappa=kappa, gain=gain) -> float:
                seconds = self.prices.verify(rows, plan.nodes(step), self.context)
                seconds += self.prices.draft(rows, plan.depths[self._drafted(step, kappa)])
                return (rows + gain * plan.expected[step]) / seconds

            step = plan.best(rate)
            best = max(best, (rate(step), step, kappa), key=lambda choice: choice[0])
        return best[1], best[2]

    def _learn(self, survival: Tensor) -> None:
        """Take down what choosing among more drafted tokens would have gained now, as far as they were drafted."""
        plan = self._plan
        step = self._best(len(survival))[0] if self._budget is None else self._budget
        if not (plan.packed and step):
            return
        places, had = torch.arange(survival.shape[1]), (survival >= 0).sum(1).tolist()

        def best_of(drafted: int) -> float | None:
            lengths = plan.lengths(drafted)
            if any(length > n for length, n in zip(lengths, had)):
                return None
            among = survival.where(places < torch.tensor(lengths)[:, None], -1.0)
            return Growth(among, True).expected[min(step, drafted)]

        alone = best_of(step)
        for kappa in self.gains if alone else ():
            chosen = best_of(self._drafted(step, kappa))
            if chosen is not None:
                self.gains[kappa] = self.memory * self.gains[kappa] + (1 - self.memory) * chosen / alone
