"""AdaFlash's length head (2607.19223): how much of a block is worth verifying, by the block's states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .parts import Part, Scored

if TYPE_CHECKING:
    from .drafters.base import TargetView
    from .heads import HeadConfig, HeadedDrafter
    from .training.records import Unrolled

KINDS = ("two_model", "subsequent")


class LengthHead(Part):
    """States of a block -> the share of it, anchor included, that is worth verifying.

    kind: "two_model" reads the mean over all the block's slots, the anchor's included, and the last slot; "subsequent"
        the mean over them of their laws' largest probability, entropy and five largest probabilities.
    bottleneck: the width in between.

    Its training term "length" is the squared distance from (matching tokens + 1) / (drafts + 1), the states detached:
    the one ahead keeps the head from talking itself into ever shorter drafts.
    """

    terms = {"length": False}

    def __init__(self, config: HeadConfig, kind: str = "two_model", bottleneck: int = 256):
        super().__init__()
        if kind not in KINDS or bottleneck < 1:
            raise ValueError(
                f"length_head takes kind {' or '.join(KINDS)} and bottleneck from 1, got {kind!r} and {bottleneck}"
            )
        self.kind = kind
        if kind == "two_model":
            self.down = nn.Linear(2 * config.hidden_size, bottleneck)
            self.res = nn.Sequential(nn.Linear(bottleneck, bottleneck), nn.SiLU())
            self.out = nn.Linear(bottleneck, 1)
        else:
            self.proj = nn.Sequential(nn.Linear(7, bottleneck), nn.SiLU(), nn.Linear(bottleneck, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Of whole blocks the states [..., S, H], or, for "subsequent", the logits [..., S, K] -> [...] in (0, 1)."""
        if self.kind == "two_model":
            u = F.silu(self.down(torch.cat((inputs.mean(-2), inputs[..., -1, :]), -1)))
            return self.out(u + self.res(u))[..., 0].sigmoid()
        probs = inputs.float().softmax(-1)
        best = probs.topk(5).values
        statistics = torch.cat((best[..., :1], torch.special.entr(probs).sum(-1, keepdim=True), best), -1).mean(-2)
        return self.proj(statistics.to(self.proj[0].weight.dtype))[..., 0].sigmoid()

    def share(self, drafter: HeadedDrafter, view: TargetView, hidden: Tensor) -> Tensor:
        """[..., S, H] states of whole blocks -> [...] float32."""
        inputs = hidden if self.kind == "two_model" else drafter.logits(view, hidden)
        return self(inputs).float()

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, scored: Scored) -> None:
        """Add the term to what the slots say; each slot of an anchor has the anchor's value."""

        def term(teacher: Tensor | None, labels: Tensor, mask: Tensor) -> Tensor:
            if unrolled.blocks is None:
                raise ValueError("the term length reads whole blocks; train it with unroll.mode plain")
            with torch.no_grad():
                chosen = scored.logits.argmax(-1) if scored.chosen is None else scored.chosen
                goal = length_label(chosen == labels)
                inputs = unrolled.blocks if self.kind == "two_model" else drafter.logits(view, unrolled.blocks)
            error = (self(inputs.detach()).float() - goal).square()
            return error[:, None].expand(mask.shape)

        scored.terms["length"] = term


def length_label(matches: Tensor) -> Tensor:
    """[..., S] bool, which drafts are right -> [...] float32 (matching prefix + 1) / (S + 1), at most 1."""
    accepted = matches.long().cumprod(-1).sum(-1)
    return (accepted + 1).clamp(max=matches.shape[-1] + 1) / (matches.shape[-1] + 1)


def verified_length(share: Tensor, size: int, rate: float = 1.0, shortest: int = 1) -> Tensor:
    """[...] shares of a block of `size`, times `rate` -> tokens to verify, anchor included, from `shortest` to all;
    halves go to the even neighbour."""
    return (share * size * rate).round().clamp(shortest, size).long()
