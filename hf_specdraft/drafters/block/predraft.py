"""What a draft is worth, told before it is made (ForeSpark): a small network on what the drafter reads anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parts import Part, Scored

if TYPE_CHECKING:
    from ...training.records import Unrolled
    from .configuration_block import BlockConfig

# What an accepted length counts, a token later.
FADING = 0.97


class PreDraft(Part):
    """Chances that the next draft's tokens are accepted, each given that those before it were, from the context's last
    row, the accepted lengths of late and the context's length.

    Options: hidden, the width of the layer between.
    Its training term "survival" is the likelihood of how far drafts along the text agree with it (`survival_loss`). It
    sends no gradient into the rest of the drafter.
    """

    terms = {"survival": False}

    def __init__(self, config: BlockConfig, hidden: int = 256):
        super().__init__()
        if hidden < 1:
            raise ValueError(f"predraft.hidden must be at least 1, got {hidden}")
        self.norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size + 2, hidden)
        self.fc2 = nn.Linear(hidden, config.num_drafts)

    def forward(self, fused: Tensor, recent: Tensor, position: Tensor) -> Tensor:
        """[..., S] float32 logits, one a slot. fused: [..., H] the last row of context as the layers read it, zeros
        where there is none. recent: [...] mean accepted length of late. position: [...] the anchor's."""
        scalars = torch.stack((recent / self.fc2.out_features, position.clamp(min=0).log1p() / 8), dim=-1)
        inputs = torch.cat((self.norm(fused), scalars.to(fused.dtype)), dim=-1)
        return self.fc2(F.silu(self.fc1(inputs))).float()

    def survival(self, fused: Tensor, recent: Tensor, position: Tensor) -> Tensor:
        """[..., S] chances that the first 1, 2, ... tokens are all accepted."""
        return F.logsigmoid(self(fused, recent, position)).cumsum(-1).exp()

    def teach(self, unrolled: Unrolled, scored: Scored) -> None:
        """Add the term to what the slots say."""
        context, anchors = unrolled.context, unrolled.anchors
        position = context.position_ids.flatten()[anchors]
        start = anchors - position  # one for each document
        fused = context.rows.detach().flatten(0, 1)[(anchors - 1).clamp(min=0)].where(position[:, None] > 0, 0)
        chosen = scored.logits.argmax(-1) if scored.chosen is None else scored.chosen

        def term(teacher: Tensor | None, labels: Tensor, mask: Tensor) -> Tensor:
            accepted = ((chosen == labels) & mask).long().cumprod(1).sum(1)
            recent = lately(accepted, position, start)
            value = survival_loss(self(fused, recent, position), accepted, mask.sum(1))
            # Other ways to train an anchor (later stages, edits of the text's own tokens) are no draft of a round.
            return value if unrolled.drafts is None else value.where(unrolled.drafts[:, None], 0)

        scored.terms["survival"] = term


def survival_loss(logits: Tensor, accepted: Tensor, offered: Tensor) -> Tensor:
    """[..., S] negative log-likelihood of discrete-time survival, slot by slot.

    logits: [..., S] of the chance to survive each slot. accepted, offered: [...] how many slots were survived of how
    many there were. Where all were, the rest is unknown (right-censored) and counts for nothing.
    """
    slot = torch.arange(logits.shape[-1], device=logits.device)
    accepted, offered = accepted[..., None], offered[..., None]
    survived = F.softplus(-logits).where(slot < accepted, 0)
    return survived + F.softplus(logits).where((slot == accepted) & (slot < offered), 0)


def lately(accepted: Tensor, position: Tensor, document: Tensor) -> Tensor:
    """[A] at each anchor, the mean accepted length of the drafts of its document that had ended there, the late ones
    first (as `History.recent`). accepted, position, document: [A] of each anchor's own draft."""
    ago = position[:, None] - (position + accepted + 1)
    weight = (FADING**ago).where((ago >= 0) & (document[:, None] == document), 0.0)
    return (weight * accepted).sum(1) / (weight.sum(1) + 0.5)


class History:
    """Accepted lengths of each row of a call."""

    def __init__(self, batch: int):
        self.sums, self.counts = [0.0] * batch, [0.0] * batch
        self.drafted = [0] * batch  # by the draft that is out

    def hear(self, tokens: list[int]) -> None:
        """`tokens[b]` more of row b are certain: of a draft, if one is out, and the target's one."""
        for b, count in enumerate(tokens):
            drafted, fading = self.drafted[b] > 0 and count > 0, FADING**count
            self.sums[b] = fading * self.sums[b] + (count - 1 if drafted else 0)
            self.counts[b] = fading * self.counts[b] + drafted
        self.drafted = [0] * len(tokens)

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone, in this order."""
        self.sums, self.counts, self.drafted = (
            [values[row] for row in rows] for values in (self.sums, self.counts, self.drafted)
        )

    @property
    def recent(self) -> list[float]:
        """Per row the mean accepted length of its drafts, in tokens, the late ones first."""
        return [total / (count + 0.5) for total, count in zip(self.sums, self.counts)]
