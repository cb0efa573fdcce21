"""DSpark's cuts of one row's draft by confidence (2607.05147): a threshold, and the scheduler for a batch of one.

What they look at: confidences (`Draft.confidence`, by a trained head or else the marginals) up to the slot they decide
about, never at later ones. Where those have seen no more than earlier tokens ("prior" and "pre"), whether a token is
verified does not depend on it, and the output keeps the target's law. Of a drafter whose confidences have seen their
own tokens, drawn rows become point rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..confidence import factors
from ..draft import Draft
from ..trees import prune
from .base import AsAsked, Situation


class _Cut(AsAsked):
    def kept(self, draft: Draft) -> Tensor:
        """[B, N] bool on the CPU, a prefix of each row."""
        raise NotImplementedError

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        if draft.confidence is None or not draft.is_chain or not draft.shape[1]:
            return draft
        keep = self.kept(draft)
        looked = draft.confidence_kind == "own"
        return prune(draft, keep, looked_at_token=looked) if looked or (draft.valid & ~keep).any() else draft


class ConfidenceCut(_Cut):
    """Cuts a chain at the first slot whose own chance, given those before it, is below the threshold."""

    name = "confidence"

    def __init__(self, situation: Situation, threshold: float = 0.5):
        super().__init__(situation)
        self.threshold = threshold

    @classmethod
    def check(cls, threshold: float) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold of policy {cls.name} must be in [0, 1], got {threshold}")

    def kept(self, draft: Draft) -> Tensor:
        return (factors(draft) >= self.threshold).cpu().cumprod(1).bool()


class DSpark(_Cut):
    """Verifies m tokens of a row, as many as make (1 + the chances that 1, ..., m tokens are accepted) / seconds(m)
    grow one by one; nothing is cut until the costs are known.

    seconds(m) is a round with a pass over m nodes. Rows decide each for itself, as if the others did the same; for
    budgets over a batch there is "dspark_batch".
    """

    name = "dspark"

    def __init__(self, situation: Situation):
        super().__init__(situation)
        self.costs = situation.costs()

    def kept(self, draft: Draft) -> Tensor:
        if not self.costs.known:
            return torch.ones(draft.shape, dtype=torch.bool)
        seconds = torch.tensor([self.costs.seconds(m) + self.costs.draft for m in range(draft.shape[1] + 1)])
        return admitted(draft.confidence.detach().cpu().float(), seconds)


def admitted(survival: Tensor, seconds: Tensor) -> Tensor:
    """Which drafts a scheduler that stops at the first drop admits.

    survival: [B, N] chances that the first 1, ..., N drafts are all accepted. seconds: [N + 1] of a round with 0, ...
    of them verified. Returns [B, N] bool, a prefix of each row. To look past a drop would let a later confidence, which
    has seen a draft's token, decide whether that draft is verified.
    """
    expected = F.pad(survival.cumsum(1) + 1, (1, 0), value=1.0)
    rate = expected / seconds.to(expected)
    return (rate[:, 1:] > rate[:, :-1]).cumprod(1).bool()
