"""DiffuSpec's adaptive draft length (2510.02358): as long as the drafter has something to say and is believed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..draft import Block, Draft
from ..drafters.base import end_ids
from ..verification import argmax
from .base import Policy, Situation


class AdaptiveDraftLength(Policy):
    """Per row, moving averages of L_gen, the slots before the first whose likeliest token ends the text, and of L_acc,
    the accepted tokens; the next draft is clip(floor(L_gen) + delta [L_acc >= L_gen], k_min, k_max) tokens.

    It looks at finished rounds only, so drawn drafts stay drawn. A drafter without a `Block` is judged by the tokens of
    its chain.

    rho: weight of the latest round, above 0 and at most 1.
    k_max: the longest draft and the first; None, or more than the call asks for: what the call asks for.
    k_min, delta: None for two thirds and one third of it, as the paper's 20 and 10 are of its 30.
    """

    name = "adl"

    def __init__(
        self,
        situation: Situation,
        rho: float = 0.5,
        delta: int | None = None,
        k_min: int | None = None,
        k_max: int | None = None,
    ):
        asked = max(situation.inner.lengths)
        self.rho = rho
        self.k_max = min(k_max or asked, asked)
        self.k_min = min(math.ceil(2 * self.k_max / 3) if k_min is None else k_min, self.k_max)
        self.delta = self.k_max // 3 if delta is None else delta
        self.lengths = [self.k_max] * situation.batch
        self._ends = torch.tensor(end_ids(situation.target))
        self._averages: list[tuple[float, float] | None] = [None] * situation.batch
        self._said: Tensor | None = None  # [B, S] whether this round's draft ends at each slot

    @staticmethod
    def check(rho: float, delta: int | None, k_min: int | None, k_max: int | None) -> None:
        if not 0 < rho <= 1:
            raise ValueError(f"policy adl: rho must be above 0 and at most 1, got {rho}")
        for option, value, least in (("delta", delta, 0), ("k_min", k_min, 1), ("k_max", k_max, 1)):
            if value is not None and value < least:
                raise ValueError(f"policy adl: {option} must be at least {least}, got {value}")
        if k_min is not None and k_max is not None and k_min > k_max:
            raise ValueError(f"policy adl: k_min {k_min} is more than k_max {k_max}")

    def before(self, rows: list[int], outlook: Callable[[], Tensor | None] = lambda: None) -> list[int]:
        return [self.lengths[row] for row in rows]

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        """The whole draft, taken down."""
        said = draft.tokens if draft.is_chain else draft.tokens[:, :0]
        if isinstance(draft.evidence, Block):
            said = argmax(draft.evidence.logits)
            said = said if draft.evidence.ids is None else draft.evidence.ids[said]
        self._said = torch.isin(said, self._ends.to(said.device))
        return draft

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        if self._said is None:
            return
        said, self._said = self._said.tolist(), None
        for row, ends, depth, tokens in zip(rows, said, offered, committed):
            if depth and tokens:
                generated = min(ends.index(True) if True in ends else depth, depth)
                self._learn(row, generated, len(tokens) - 1)

    def _learn(self, row: int, generated: int, accepted: int) -> None:
        old = self._averages[row] or (generated, accepted)
        self._averages[row] = tuple(
            self.rho * new + (1 - self.rho) * known for new, known in zip((generated, accepted), old)
        )
        generated, accepted = self._averages[row]
        longer = self.delta if accepted >= generated else 0
        self.lengths[row] = max(self.k_min, min(math.floor(generated) + longer, self.k_max))
