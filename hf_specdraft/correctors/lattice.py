"""What the correctors share that score pairs of neighbouring candidates, all at once, before a walk looks them up.

A lattice holds k candidates for each slot. Walking it costs a look-up per slot and no network, so that correction stays
cheap in batches. B rows, S slots, K tokens of the drafter's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..draft import Block
from ..parts import Scored, Term
from ..verification import argmax
from .base import Corrector, Scores, State

if TYPE_CHECKING:
    from ..drafters.base import TargetView
    from ..heads import HeadedDrafter
    from ..training.records import Unrolled


@dataclass
class Candidates:
    """The k best tokens of each slot by the marginals, the best first; of equals, the lowest first.

    index: [B, S, k] in the drafter's vocabulary. ids: [B, S, k] the same as target ids. logits: [B, S, k] float32, the
    marginals' own, with their gradient.
    """

    index: Tensor
    ids: Tensor
    logits: Tensor

    @classmethod
    def of(cls, drafter: HeadedDrafter, logits: Tensor, k: int) -> Candidates:
        """logits: [B, S, K]. With k = 1 they are what a draft without a corrector takes."""
        fixed = logits.detach()
        if k == 1:
            index = argmax(fixed)[..., None]
        else:
            index = fixed.topk(min(k, logits.shape[-1])).indices.sort().values
            order = fixed.gather(-1, index).sort(descending=True, stable=True).indices
            index = index.gather(-1, order)
        return cls(index, drafter.target_ids(index), logits.gather(-1, index).float())


def after(start: Tensor, pair: Tensor, rank: Tensor) -> Tensor:
    """[B, S, k] scores of each slot after the candidates `rank` [B, S - 1] of the slots before."""
    rows = pair.gather(2, rank[..., None, None].expand(-1, -1, 1, pair.shape[-1]))[:, :, 0]
    return torch.cat((start[:, None], rows), dim=1)


def select(start: Tensor, pair: Tensor, sweeps: int) -> Tensor:
    """[B, S] ranks: the greedy walk by Jacobi sweeps over all slots at once, from each slot's best candidate. A sweep
    sets one more slot for good, so that S sweeps are always enough, and fewer where neighbours agree."""
    rank = start.new_zeros(len(start), pair.shape[1] + 1, dtype=torch.long)
    for _ in range(sweeps):
        rank = argmax(after(start, pair, rank[:, :-1]))
    return rank


@dataclass
class LatticeState(State):
    """candidates, start [B, k] and pair [B, S - 1, k, k] are of the block's rows, whatever walks them.

    path: [B, S] ranks chosen beforehand, None where the walk chooses.
    """

    candidates: Candidates | None = None
    start: Tensor | None = None
    pair: Tensor | None = None
    path: Tensor | None = None


class LatticeCorrector(Corrector):
    """Subclasses score pairs of candidates; walks and most of teaching are the same for all.

    top_k: candidates of a slot.
    sweeps: 0 walks slot by slot, greedily or sampled. More choose the greedy walk by that many parallel sweeps
        (`select`), which are then the whole draft, even when the request samples: its law is one token.
    Raises ValueError for values that fit no lattice.
    """

    def __init__(self, config, top_k: int, sweeps: int = 0):
        super().__init__(config)
        if top_k < 1:
            raise ValueError(f"corrector top_k must be at least 1, got {top_k}")
        if sweeps < 0:
            raise ValueError(f"corrector sweeps must not be negative, got {sweeps}; 0 walks slot by slot")
        self.top_k, self.sweeps = top_k, sweeps

    def tables(
        self, drafter: HeadedDrafter, view: TargetView, block: Block, candidates: Candidates
    ) -> tuple[Tensor, Tensor]:
        """float32 log-potentials: start [B, k] of slot 0 after the anchor, pair [B, S - 1, k, k] of slot s + 1's
        candidates (last) after slot s's."""
        raise NotImplementedError

    def begin(self, drafter: HeadedDrafter, view: TargetView, block: Block) -> LatticeState:
        walkers = torch.arange(len(block.anchor), device=block.hidden.device)
        candidates = Candidates.of(drafter, block.logits, self.top_k)
        start, pair = self.tables(drafter, view, block, candidates)
        path = select(start, pair, self.sweeps) if self.sweeps else None
        return LatticeState(drafter, view, block, walkers, None, candidates, start, pair, path)

    def step(self, state: LatticeState, slot: int, previous: Tensor) -> tuple[Scores, LatticeState]:
        """A token before the slot that is none of its candidates counts as the best of them."""
        ids = state.candidates.ids[state.rows, slot]
        if state.path is not None:
            chosen = ids.gather(1, state.path[state.rows, slot, None])
            return Scores(chosen.new_zeros(chosen.shape, dtype=torch.float32), chosen), state
        if slot == 0:
            return Scores(state.start[state.rows], ids), state
        rank = rank_of(previous, state.candidates.ids[state.rows, slot - 1])
        return Scores(state.pair[state.rows, slot - 1, rank], ids), state

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, base: Tensor) -> Scored:
        """The logits are a law over all K tokens: within each slot's candidates the lattice's, with the probability
        that the marginals give them together; the marginals' own elsewhere. Drafting is restricted to the former."""
        block = Block(base, drafter.draft_ids, unrolled.hidden, unrolled.previous[:, 0], self.recall(unrolled))
        candidates = Candidates.of(drafter, base, self.top_k)
        scores = self.along(drafter, view, block, candidates, unrolled.previous)
        wide = base.to(torch.promote_types(base.dtype, torch.float32))
        shared = scores.log_softmax(-1) + candidates.logits.logsumexp(-1, keepdim=True)
        chosen = candidates.index.gather(-1, argmax(scores.detach())[..., None])[..., 0]
        return Scored(
            wide.scatter(-1, candidates.index, shared.to(wide.dtype)),
            base,
            chosen,
            self.lessons(drafter, view, block, candidates, scores, unrolled.previous),
        )

    def along(
        self, drafter: HeadedDrafter, view: TargetView, block: Block, candidates: Candidates, previous: Tensor
    ) -> Tensor:
        """[a, S, k] scores of each slot after the tokens `previous` [a, S]."""
        start, pair = self.tables(drafter, view, block, candidates)
        return after(start, pair, rank_of(previous[:, 1:], candidates.ids[:, :-1]))

    def recall(self, unrolled: Unrolled):
        """What `block.memory` is in drafting, for the anchors of a training batch."""
        return None

    def lessons(
        self,
        drafter: HeadedDrafter,
        view: TargetView,
        block: Block,
        candidates: Candidates,
        scores: Tensor,
        previous: Tensor,
    ) -> dict[str, Term]:
        """The corrector's training terms. scores: [a, S, k] as `along` gives them."""
        raise NotImplementedError


def rank_of(tokens: Tensor, candidates: Tensor) -> Tensor:
    """[...] where each token [...] stands among its candidates [..., k], 0 for one that does not."""
    return (candidates == tokens[..., None]).long().argmax(-1)
