"""SpecDec++ (2405.19715): draft while the drafter's acceptance head believes in all tokens so far."""

from __future__ import annotations

import torch
from torch import Tensor

from ..acceptance import acceptance_head_of
from ..draft import Partial
from .base import Situation
from .stop_rules import StopRule


class SpecDecPP(StopRule):
    """Stops once the estimated chance that some token so far is rejected is above `threshold`, with `shortest` tokens
    at the least; `num_assistant_tokens` (20 as published) is the most.

    The head rates tokens that the drafter has read, so each decision rests on the tokens before the latest, which is
    always in the draft unrated. Raises ValueError for a drafter without an acceptance head.
    """

    name = "specdecpp"

    def __init__(self, situation: Situation, threshold: float = 0.3, shortest: int = 2):
        super().__init__(situation)
        self.head = acceptance_head_of(situation.drafter)
        if self.head is None:
            raise ValueError(
                f"policy {self.name} needs a drafter with an acceptance head: train one (drafter.acceptance_head with "
                "loss.terms acceptance), or choose another policy"
            )
        self.threshold, self.shortest = threshold, shortest
        self._all: Tensor | None = None

    @classmethod
    def check(cls, threshold: float, shortest: int) -> None:
        if not 0 <= threshold <= 1 or shortest < 1:
            raise ValueError(
                f"policy {cls.name} takes a threshold in [0, 1] and shortest from 1, got {threshold} and {shortest}"
            )

    def unsure(self, partial: Partial) -> Tensor:
        if partial.step == 1:  # the anchor was read: it is committed
            self._all = torch.ones(len(partial.tokens), device=partial.fed.device)
        else:
            self._all = self._all * self.head(partial.fed)
        return ~(1 - self._all <= self.threshold) & (partial.step >= self.shortest)
