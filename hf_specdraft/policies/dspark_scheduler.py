"""DSpark's scheduler (arXiv 2607.05147, algorithm 1): admit drafted tokens of a batch while throughput grows."""

from __future__ import annotations

from ..draft import Draft
from .budgets import Budgeted, Growth, ranked, shortened


class DSparkScheduler(Budgeted):
    """Admits the drafted tokens of all rows to verification, the likeliest first, while expected tokens per second
    grow, and stops at the first drop. Where the pass is a rectangle, a column at a time. For calibrated confidences.

    What it looks at: of confidences that had seen the tokens before their own ("pre"), whether a token is verified
    depends on nothing that only its own or later ones can tell; that is what the early stop is for. Drawn rows stay
    drawn, unless the confidences had seen their own tokens ("own").
    """

    name = "dspark_batch"

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        if draft.confidence is None or not draft.shape[1]:
            return draft
        survival, rank = ranked(draft)
        growth = Growth(survival, self.prices.packed)

        def rate(step: int) -> float:
            tokens = sum(going) + growth.expected[step]
            return tokens / self.prices.verify(len(going), growth.nodes(step), self.context)

        lengths = growth.lengths(growth.best(rate, stops_early=True))
        return shortened(draft, rank, lengths, looked_at_token=draft.confidence_kind == "own")
