"""DFlash 2's candidate selector, which DCOCO's contextual correction is here: how well a candidate follows its
predecessor is a product of a code of each, gated by the slot's state, on top of the candidate's own logit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization

from ..draft import Block
from ..parts import Term
from .lattice import Candidates, LatticeCorrector

if TYPE_CHECKING:
    from ..drafters.base import TargetView
    from ..heads import HeadedDrafter


class Selector(LatticeCorrector):
    """score(j after i at slot s) = logit[s, j] + sum_r A(i)_r (W h_s)_r B(j)_r. B starts at 0: the plain drafter.

    top_k: candidates of a slot. rank: R of the codes.
    form: of the codes. "codebook", two tables [V, R] (DFlash 2), or "embed", two projections of the embedding [R, H]
        (ours: about a fortieth of the weights).
    force_gold: in training, the text's token takes the last candidate's place where it is none of them; else such slots
        do not count (as in DFlash 2).
    on_walk: chance that a slot counts only if the selector's own choices at all slots before are the text's tokens, so
        that it learns most where drafts really get. 0 counts all.

    Term "selector_ce": cross entropy of the text's token among the candidates, after the text's token before it.
    """

    name = "selector"
    terms = {"selector_ce": False}

    def __init__(
        self,
        config,
        top_k: int = 16,
        rank: int = 256,
        form: str = "codebook",
        force_gold: bool = True,
        on_walk: float = 0.0,
        sweeps: int = 0,
    ):
        super().__init__(config, top_k, sweeps)
        if rank < 1:
            raise ValueError(f"selector rank must be at least 1, got {rank}")
        if not 0 <= on_walk <= 1:
            raise ValueError(f"selector on_walk must be a chance, 0 to 1, got {on_walk}")
        self.rank, self.form, self.force_gold, self.on_walk = rank, form, force_gold, on_walk
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        if form == "codebook":
            if config.vocab_size is None:
                raise ValueError("selector form='codebook' needs vocab_size, the target's number of tokens")
            self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
            self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        elif form == "embed":
            self.predecessor_projection = nn.Linear(config.hidden_size, rank, bias=False)
            self.successor_projection = nn.Linear(config.hidden_size, rank, bias=False)
        else:
            raise ValueError(f"selector form must be 'codebook' or 'embed', got {form!r}")

    def init_weights(self) -> None:
        """N(0, 0.02), the successors' side 0."""
        if self.form == "codebook":
            before, behind = self.predecessor_codebook, self.successor_codebook
        else:
            before, behind = self.predecessor_projection.weight, self.successor_projection.weight
        initialization.normal_(self.hidden_projection.weight, std=0.02)
        initialization.normal_(before, std=0.02)
        initialization.zeros_(behind)

    def codes(self, drafter: HeadedDrafter, view: TargetView, tokens: Tensor) -> Tensor:
        """[...] target ids -> [..., R] of them as predecessors."""
        return self._codes(drafter, view, tokens, "predecessor")

    def _codes(self, drafter: HeadedDrafter, view: TargetView, tokens: Tensor, side: str) -> Tensor:
        if self.form == "embed":
            return getattr(self, f"{side}_projection")(drafter.embed(tokens, view).detach())
        # The target's head may be padded further than the tables: such a row stands for no token.
        table = getattr(self, f"{side}_codebook")
        return table[tokens.clamp(max=len(table) - 1)]

    def fit(
        self, drafter: HeadedDrafter, view: TargetView, hidden: Tensor, predecessors: Tensor, successors: Tensor
    ) -> Tensor:
        """[B, S, P, k] float32: what successors' ids [B, S, k] gain after predecessors' [B, S, P], hidden [B, S, H]."""
        before = self.codes(drafter, view, predecessors)
        behind = self._codes(drafter, view, successors, "successor")
        gate = self.hidden_projection(hidden)[:, :, None]
        return (before.float() * gate.float()) @ behind.float().mT

    def tables(
        self, drafter: HeadedDrafter, view: TargetView, block: Block, candidates: Candidates
    ) -> tuple[Tensor, Tensor]:
        k = candidates.ids.shape[-1]
        # One predecessor before the first slot, as many times as the others have some.
        first = block.anchor[:, None, None].expand(-1, 1, k)
        predecessors = torch.cat((first, candidates.ids[:, :-1]), dim=1)
        scores = candidates.logits[:, :, None] + self.fit(drafter, view, block.hidden, predecessors, candidates.ids)
        return scores[:, 0, 0], scores[:, 1:]

    def along(
        self, drafter: HeadedDrafter, view: TargetView, block: Block, candidates: Candidates, previous: Tensor
    ) -> Tensor:
        """Scored for these tokens themselves, whether candidates or not."""
        gain = self.fit(drafter, view, block.hidden, previous[..., None], candidates.ids)
        return candidates.logits + gain[:, :, 0]

    def lessons(
        self,
        drafter: HeadedDrafter,
        view: TargetView,
        block: Block,
        candidates: Candidates,
        scores: Tensor,
        previous: Tensor,
    ) -> dict[str, Term]:
        def ce(teacher, labels, mask):
            gold = candidates.index == labels[..., None]
            held, rank = gold.any(-1), gold.long().argmax(-1, keepdim=True)
            among, counted = scores, mask & (labels >= 0)
            if self.force_gold:
                label = labels.clamp(min=0)[..., None]
                gain = self.fit(drafter, view, block.hidden, previous[..., None], drafter.target_ids(label))
                forced = block.logits.gather(-1, label).float() + gain[:, :, 0]
                last = torch.where(held[..., None], scores[..., -1:], forced)
                among = torch.cat((scores[..., :-1], last), dim=-1)
                rank = rank.where(held[..., None], scores.shape[-1] - 1)
            else:
                counted = counted & held
            if self.on_walk:
                right = held & (scores.detach().argmax(-1, keepdim=True) == rank)[..., 0]
                reached = torch.cat((torch.ones_like(right[:, :1]), right[:, :-1].long().cumprod(1).bool()), dim=1)
                counted = counted & (reached | (torch.rand(mask.shape, device=mask.device) >= self.on_walk))
            return -among.log_softmax(-1).gather(-1, rank)[..., 0] * counted

        return {"selector_ce": ce}
