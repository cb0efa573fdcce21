"""Drafting further blocks before one verification: DLoop (2610.07659), and any policy that extends drafts (FailFast).

A further block continues the last drafted token. In the place of the target's states of the tokens drafted so far,
which do not exist yet, it reads the drafter's own: the state that gave a token is that token's context row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from ...draft import Context, Draft, Law, Partial
from ...parts import Part

if TYPE_CHECKING:
    from .session_block import BlockSession


class OwnStates(Part):
    """Makes context rows of the drafter's own states, in the place of `fc`. Starts as the identity.

    Earlier stages are counted from 0; those beyond the trained ones count as the last of them.
    """

    def __init__(self, config):
        super().__init__()
        self.stage_embedding = nn.Parameter(torch.zeros(config.max_stages - 1, config.hidden_size))
        self.adapter = nn.Linear(config.hidden_size, config.hidden_size, bias=False) if config.stage_adapter else None

    def init_weights(self) -> None:
        initialization.zeros_(self.stage_embedding)
        if self.adapter is not None:
            initialization.eye_(self.adapter.weight)

    def forward(self, hidden: Tensor, stages: Tensor, norm: nn.Module) -> Tensor:
        """hidden: [B, C, H] states after the final norm, made at `stages` [C]. norm: that of fused features."""
        rows = norm(hidden if self.adapter is None else self.adapter(hidden))
        return rows + self.stage_embedding[stages.clamp(max=len(self.stage_embedding) - 1)]


def draft_stages(session: BlockSession, context: Context) -> Draft:
    """A chain of one block or more per row, of `context.lengths[b]` tokens at most; a tree has one block.

    After each full block that leaves room, `context.more` is asked. The drafter's own rule (`Partial.own`) goes on
    while the block's tokens have together a log-probability above `stage_threshold`, for `max_stages` blocks. The
    decision sees drawn tokens, but all of them are verified whatever it is: it concerns later ones only.
    """
    config = session.drafter.config
    drafts, held, stage = [], None, 0
    left, asked = context.lengths, False
    while True:
        draft = session.draft_block(context)
        drafts.append(draft)
        drafted = [0] if context.tree else draft.valid.sum(1).tolist()
        left = [n - m if m == config.num_drafts else 0 for n, m in zip(context.lengths, drafted)]
        if not any(left):
            break
        asked = True
        going = context.more(_partial(draft, (stage + 1) * config.num_drafts, config, stage))
        left = [n if goes else 0 for n, goes in zip(left, going)]
        if not any(left):
            break
        hidden = draft.evidence.hidden
        # The last token is the next anchor, which has no row in its own block; nor has any row the round's anchor.
        rows = hidden[:, :-1] if held is None else torch.cat((held, hidden[:, :-1]), dim=1)
        first = torch.tensor(context.position) + int(held is None)
        made = torch.full((rows.shape[1],), stage)
        made[:1] -= int(held is not None)
        if rows.shape[1]:
            session.temporary = {
                "own_states": rows,
                "feature_positions": (first[:, None] + torch.arange(rows.shape[1])).to(rows.device),
                "counts": [rows.shape[1] if n else 0 for n in left],
                "stages": made.to(rows.device),
            }
        held, stage = hidden[:, -1:], stage + 1
        context = replace(
            context,
            anchor=draft.tokens[:, -1],
            position=[position + config.num_drafts for position in context.position],
            lengths=left,
            nodes=max(left),
        )
    return _joined(drafts, asked)


def _partial(draft: Draft, step: int, config, stage: int) -> Partial:
    chances = _chances(draft)
    score = chances.log().sum(1).clamp(min=torch.finfo(torch.float32).min)
    own = [stage + 1 < config.max_stages and s > config.stage_threshold for s in score.tolist()]
    block = draft.evidence
    return Partial(
        step, draft.tokens[:, -1], block.logits[:, -1], block.hidden[:, -1], ids=block.ids, chances=chances, own=own
    )


def _chances(draft: Draft) -> Tensor:
    """[B, N] the probability that the drafter gave to each token of a chain, given those before it."""
    law = draft.law
    if law is not None and bool(law.rows.all()):
        if law.ids is None:
            return law.probs.gather(2, draft.tokens[..., None])[..., 0]
        return law.probs.masked_fill(law.ids != draft.tokens[..., None], 0).sum(-1)
    rating = draft.confidence.float()
    return (rating / F.pad(rating[:, :-1], (1, 0), value=1.0)).nan_to_num(0)


def _joined(drafts: list[Draft], asked: bool) -> Draft:
    """The blocks of each row as one chain."""
    last = drafts[-1]
    # Whether there are nodes behind a node depends on its own token once that was asked.
    kind = "pre" if asked and last.confidence_kind == "prior" else last.confidence_kind
    if len(drafts) == 1:
        return replace(last, confidence_kind=kind)
    lengths = torch.stack([draft.valid.sum(1) for draft in drafts]).sum(0).tolist()
    blocks = [draft.evidence for draft in drafts]
    law = None
    if all(draft.law is not None for draft in drafts):
        ids = None if last.law.ids is None else torch.cat([draft.law.ids for draft in drafts], 1)
        rows = torch.stack([draft.law.rows for draft in drafts]).all(0)
        law = Law(torch.cat([draft.law.probs for draft in drafts], 1), ids, rows)
    confidence = [drafts[0].confidence]
    for draft in drafts[1:]:
        confidence.append(confidence[-1][:, -1:] * draft.confidence)
    return Draft.chain(
        torch.cat([draft.tokens for draft in drafts], 1),
        lengths,
        law=law,
        confidence=torch.cat(confidence, 1),
        confidence_kind=kind,
        evidence=replace(
            blocks[0],
            **{
                name: torch.cat([getattr(block, name) for block in blocks], 1)
                for name in ("logits", "hidden", "confidence")
                if getattr(blocks[0], name) is not None
            },
        ),
    )
