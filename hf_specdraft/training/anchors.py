"""Where drafts start in a text, and what they should say: the same pairs that decoding meets.

Decoding's first anchor is the first token the target wrote (the prefill gives it without a draft), and an anchor is
always committed. So an anchor is a token the target wrote with one more behind it; the prompt's last token never is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .records import TrainingBatch


def choose_anchors(batch: TrainingBatch, count: int | None = None, generator: torch.Generator | None = None) -> Tensor:
    """[B, L] bool: all anchors, or `count` of each document, drawn uniformly without replacement on the CPU (from its
    default generator unless one is given), so that a seed gives the same anchors on every device."""
    if count is not None and count < 1:
        raise ValueError(f"anchors must be at least 1, or None for all, got {count}")
    documents, written = batch.document_ids, batch.loss_mask & (batch.document_ids > 0)
    anchors = torch.zeros_like(written)
    anchors[:, :-1] = written[:, :-1] & written[:, 1:] & (documents[:, :-1] == documents[:, 1:])
    if count is None:
        return anchors
    draw = torch.rand(anchors.shape, generator=generator).to(anchors.device).masked_fill(~anchors, 2).flatten()
    rows = torch.arange(len(documents), device=documents.device)[:, None]
    group = (rows * (documents.max() + 1) + documents).flatten()
    # Document by document, each in the order of its draws.
    order = draw.argsort()
    order = order[group[order].argsort(stable=True)]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(group[order], group[order])
    chosen = torch.zeros_like(anchors).flatten()
    chosen[order] = rank < count
    return chosen.view_as(anchors) & anchors


def following(batch: TrainingBatch, anchors: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `slots` slots should say after each of `anchors` [A], indices into the flattened columns: `Unrolled`'s
    labels, rows and mask, [A, slots] each. Where mask is False the others are any valid index."""
    ahead = torch.arange(slots, device=anchors.device)
    width = batch.input_ids.shape[1]
    inside = anchors[:, None] % width + ahead + 1 < width
    rows = (anchors[:, None] + ahead).where(inside, anchors[:, None])
    tokens = rows + inside  # the column after each row's
    documents = batch.document_ids.flatten()
    wanted = inside & batch.loss_mask.flatten()[tokens] & (documents[tokens] == documents[anchors][:, None])
    return batch.input_ids.flatten()[tokens], rows, wanted.cumprod(1).bool()
