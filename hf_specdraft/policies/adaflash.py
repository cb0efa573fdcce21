"""AdaFlash's adaptive verification length (2607.19223)."""

from __future__ import annotations

import torch

from ..draft import Draft
from ..length_head import verified_length
from ..trees import prune
from .base import AsAsked, Situation


class AdaFlash(AsAsked):
    """Verifies of each block as many tokens as the drafter's length head finds worth while: round(share * size * rate),
    anchor included, from `shortest` to all. Drafting is whole: a parallel drafter saves nothing there.

    The head reads the states of the block's pass, which no token of the draft has entered (the corrector's tokens come
    after it, an editor's before it), so the length says nothing of the tokens it cuts.

    rate: above 1 verifies more than the head says. smoothing: weight of this round's length in a running mean of the
    row's; 1 for the length itself. explore: share of rounds whose whole block is verified, so that training on what
    was accepted meets lengths the head would have cut; drawn from a generator of the call's own, by `seed`.
    Raises ValueError for a drafter without a length head, and where trees are drafted, which have no one length.
    """

    name = "adaflash"

    def __init__(
        self,
        situation: Situation,
        rate: float = 1.0,
        shortest: int = 1,
        smoothing: float = 1.0,
        explore: float = 0.0,
        seed: int = 0,
    ):
        if getattr(situation.drafter, "length_head", None) is None:
            raise ValueError(
                f"policy {self.name} needs a block drafter with a length head: train one (drafter.length_head with "
                "loss.terms length), or choose another policy"
            )
        if situation.nodes:
            raise ValueError(f"policy {self.name} cuts chains; set tree_nodes to 0, or choose another policy")
        super().__init__(situation)
        self.rate, self.shortest = rate, shortest
        self.smoothing, self.explore = smoothing, explore
        self.size = situation.drafter.config.num_drafts + 1
        self.generator = torch.Generator().manual_seed(seed)
        self._means: dict[int, float] = {}
        self._rows: list[int] = []

    @classmethod
    def check(cls, rate: float, shortest: int, smoothing: float, explore: float, **others) -> None:
        if not (rate > 0 and shortest >= 1 and 0 < smoothing <= 1 and 0 <= explore <= 1):
            raise ValueError(
                f"policy {cls.name} takes rate above 0, shortest from 1, smoothing in (0, 1], explore in [0, 1], got "
                f"{rate}, {shortest}, {smoothing} and {explore}"
            )

    def before(self, rows: list[int], outlook=None) -> list[int]:
        self._rows = rows
        # The head tells of one block: further ones would be cut all the same.
        return [min(length, self.size - 1) for length in self.inner.before(rows)]

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        share = getattr(draft.evidence, "share", None)
        if share is None or not draft.is_chain:
            return draft
        lengths = verified_length(share, self.size, self.rate, self.shortest).tolist()
        for b, row in enumerate(self._rows):
            mean = self._means.get(row, float(lengths[b]))
            self._means[row] = mean + self.smoothing * (lengths[b] - mean)
            lengths[b] = round(self._means[row])
        if self.explore:
            whole = torch.rand(len(lengths), generator=self.generator) < self.explore
            lengths = [self.size if w else n for n, w in zip(lengths, whole.tolist())]
        keep = torch.arange(1, draft.shape[1] + 1) < torch.tensor(lengths)[:, None]
        return prune(draft, keep, looked_at_token=False) if (draft.valid & ~keep).any() else draft
