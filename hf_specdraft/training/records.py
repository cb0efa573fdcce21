"""The two records that training passes around: what a batch holds, and what a drafter makes of it.

B rows, L columns, A anchors, S slots (the tokens one draft has), H the drafter's width, Ht the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class TrainingBatch:
    """Right-padded rows, each one or several documents packed one after the other.

    input_ids: [B, L] tokens.
    document_ids: [B, L] 1, 2, ... by document within the row, 0 for padding; nothing is seen across documents.
    position_ids: [B, L] positions within the document, from 0.
    loss_mask: [B, L] bool, tokens that the target wrote (its stop tokens included): those a drafter may have to draft.
    features: [B, L, n*Ht] outputs of the drafter's `feature_layers` at each column, None for drafters that read none.
    last_hidden: [B, L, Ht] what the target's head reads; row t's law is about the token at t + 1. None where no
        objective asks for the target's law.
    verify: (batch, anchors' columns [B, A], drafted tokens [B, A, K]) -> their features and the target's choices
        (`training.verify.BranchVerifier`), for drafters that train on rejected rows; else None.
    """

    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    features: Tensor | None = None
    last_hidden: Tensor | None = None
    verify: Callable[[TrainingBatch, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def to(self, device: torch.device) -> TrainingBatch:
        """The same batch on a device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in tensors.items()})


@dataclass
class FusedContext:
    """What a block drafter's layers read of a batch's context, with gradients.

    rows: [B, L, H] fused features of each column; an anchor sees those of its document before its own column.
    document_ids, position_ids: [B, L] of the batch, on the same device.
    """

    rows: Tensor
    document_ids: Tensor
    position_ids: Tensor


@dataclass
class Unrolled:
    """What a drafter would draft at A anchors of a batch, teacher-forced, S slots each.

    hidden: [A, S, H] what the drafter's head reads (`Drafter.logits` makes logits of it).
    labels: [A, S] the tokens that follow the anchor in the text.
    rows: [A, S] index into the batch's flattened [B * L] columns of the target row whose law is about the same token.
    mask: [A, S] bool, slots that count: a prefix of each anchor's slots, ending where the text or the target's own
        words end.
    anchors: [A] index into the flattened [B * L] columns of each anchor, the last token its draft may read.
    previous: [A, S] the text's token before each slot: the anchor, then the labels. For correctors.
    context: what else parts read of the batch (a FusedContext of block drafters), whole whatever the anchors.
    weight: [A] times the loss's weights of the slots, None for 1.
    drafts: [A] bool, the anchors that metrics are about, None for all: those that are drafted as in decoding. A family
        that trains an anchor several ways has it several times.
    blocks: [A, B', H] states of all slots of each anchor's block, the anchor's own included, where a part reads them.
    """

    hidden: Tensor
    labels: Tensor
    rows: Tensor
    mask: Tensor
    anchors: Tensor
    previous: Tensor | None = None
    context: Any = None
    weight: Tensor | None = None
    drafts: Tensor | None = None
    blocks: Tensor | None = None

    def at(self, part: slice) -> Unrolled:
        """Some of the anchors."""
        names = ("hidden", "labels", "rows", "mask", "anchors", "previous", "weight", "drafts", "blocks")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value if value is None else value[part] for name, value in given.items()})
