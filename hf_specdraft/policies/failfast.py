"""Draft on while every token was sure, give up cheaply where one was not."""

from __future__ import annotations

from ..draft import Partial
from .base import Policy, Situation
from .stop_rules import chance


class FailFast(Policy):
    """FailFast's rule ("Fail Fast, Win Big", ruipeterpan/failfast): a draft goes on while its newest chunk was sure.

    A chunk is a block of a drafter that drafts by the block, else a token. A draft is extended by another one if every
    token of the newest had, when it was drafted, a probability of at least `min_confidence`; the chunk that was not
    sure is verified all the same. So a decision looks at drawn tokens, but concerns later ones only: the law is kept.
    Block drafters that were trained for one block read their own states from the second on (`stages`), without having
    learnt to; DLoop trains for it. Trees have one block.

    max_draft: tokens of a draft at most, in the place of num_assistant_tokens.
    """

    name = "failfast"

    def __init__(self, situation: Situation, min_confidence: float = 0.45, max_draft: int = 60):
        self.min_confidence, self.max_draft = min_confidence, max_draft

    @classmethod
    def check(cls, min_confidence: float, max_draft: int) -> None:
        if not 0 <= min_confidence <= 1 or max_draft < 1:
            raise ValueError(
                f"policy {cls.name} needs min_confidence in [0, 1] and max_draft of at least 1, got {min_confidence} "
                f"and {max_draft}"
            )

    def before(self, rows: list[int], outlook=None) -> list[int]:
        return [self.max_draft] * len(rows)

    def more(self, partial: Partial) -> list[bool]:
        chances = chance(partial)[:, None] if partial.chances is None else partial.chances
        return (chances >= self.min_confidence).all(1).tolist()
