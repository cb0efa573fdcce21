"""EAGLE-3's training-time test (2503.01840): what each draft of a text would be, fed its own states and the text's
tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...training.records import TrainingBatch, Unrolled
from ..base import TargetView

if TYPE_CHECKING:
    from .modeling_eagle3 import Eagle3Drafter


def unroll_eagle3(
    drafter: Eagle3Drafter,
    view: TargetView,
    batch: TrainingBatch,
    steps: int | None = None,
    anchors: int | None = None,
) -> Unrolled:
    """Drafts of `steps` tokens (by default num_assistant_tokens) from every place where decoding may draft.

    Anchors are the target's own tokens that another one follows. anchors: at most so many a document, drawn at random.

    Step i's row of an anchor sees the rows with features up to its own, and its own rows of steps 1 to i: what
    decoding's cache holds. Raises ValueError for steps below 1 or a batch without features.
    """
    steps = drafter.config.num_assistant_tokens if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if batch.features is None:
        raise ValueError(
            "the batch has no features; capture the target's layers that the drafter reads (feature_layers)"
        )
    ids, documents = batch.input_ids, batch.document_ids
    rows, columns = ids.shape
    at, real, mask = _anchors(batch, steps, anchors)
    row = torch.arange(rows, device=ids.device)[:, None]

    def at_anchors(x: Tensor) -> Tensor:
        return x[row, at - 1]  # the newest row with features ends in the anchor

    seen = torch.arange(columns, device=ids.device) < at[:, :, None]
    seen = (seen & (documents[:, None] == documents[row, at - 1][:, :, None]))[:, None]  # [B, 1, M, L]
    x = drafter.fuse(batch.features.to(drafter.device, drafter.dtype))
    embeds = drafter.embed(ids.roll(-1, 1), view)
    rope = drafter.rotary_emb(x, batch.position_ids)
    # Per layer, keys and values of the rows with features, and of each later step.
    stable: list[tuple[Tensor, Tensor]] = []
    drafted: list[list[tuple[Tensor, Tensor]]] = [[] for _ in drafter.layers]
    for index, layer in enumerate(drafter.layers):
        residual, normed = layer.read(x, embeds)
        stable.append(layer.self_attn.keys_values(normed, rope))
        if index + 1 < len(drafter.layers):
            attended = F.scaled_dot_product_attention(
                layer.self_attn.queries(normed, rope), *stable[-1], attn_mask=_causal(documents), enable_gqa=True
            )
            x = layer.write(residual, attended.transpose(1, 2).flatten(2))
        else:
            queries = layer.self_attn.queries(at_anchors(normed), [at_anchors(part) for part in rope])
            x = layer.write(at_anchors(residual), attend(queries, *stable[-1], seen, []))
    out = drafter.finish(x)
    hidden = [out.last_hidden_state]
    positions = at_anchors(batch.position_ids)
    for step in range(1, steps):
        x = out.state
        embeds = drafter.embed(ids[row, (at + step).clamp(max=columns - 1)], view)
        rope = drafter.rotary_emb(x, positions + step)
        for layer, (keys, values), own in zip(drafter.layers, stable, drafted):
            residual, normed = layer.read(x, embeds)
            own.append(layer.self_attn.keys_values(normed, rope))
            x = layer.write(residual, attend(layer.self_attn.queries(normed, rope), keys, values, seen, own))
        out = drafter.finish(x)
        hidden.append(out.last_hidden_state)
    # Slot s drafts token at + 1 + s, about which the target's row at + s speaks.
    label = at[:, :, None] + 1 + torch.arange(steps, device=ids.device)
    flat = columns * row[:, :, None] + (label - 1).clamp(max=columns - 1)
    labels = ids[row[:, :, None], label.clamp(max=columns - 1)]
    return Unrolled(
        hidden=torch.stack(hidden, dim=2)[real],
        labels=labels[real],
        rows=flat[real],
        mask=mask[row, at][real],
        anchors=(columns * row + at)[real],
    )


def _anchors(batch: TrainingBatch, steps: int, most: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Columns [B, M] of the anchors, which of them are real [B, M], and for every column as an anchor the slots that
    count [B, L, S]."""
    documents = batch.document_ids
    # Tokens of the target's own behind another token of their document.
    follows = F.pad(documents[:, 1:] == documents[:, :-1], (1, 0)) & batch.loss_mask & (documents > 0)
    slots = F.pad(follows[:, 1:], (0, steps)).unfold(1, steps, 1).long().cumprod(-1).bool()
    able = follows & slots[..., 0]
    if most is not None:
        able = able & (_rank(able, documents) < most)
    count = able.sum(1)
    width = int(count.max())
    order = (~able).long().argsort(dim=1, stable=True)[:, :width]
    real = torch.arange(width, device=order.device) < count[:, None]
    # Column 1 stands for the missing ones: something that sees something.
    return order.where(real, 1), real, slots


def _rank(able: Tensor, documents: Tensor) -> Tensor:
    """[B, L] a random order, from 0, of the columns of each document that are `able`."""
    key = documents + (torch.rand(able.shape, dtype=torch.float64, device=able.device) + ~able) / 2
    first = torch.searchsorted(documents.sort(dim=1).values, documents.contiguous())
    return key.argsort(dim=1).argsort(dim=1) - first


def _causal(documents: Tensor) -> Tensor:
    """[B, 1, L, L] bool: the columns of the same document up to each column."""
    same = documents[:, None] == documents[:, :, None]
    return same.tril()[:, None]


def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of anchors to shared keys, and to keys of their own.

    queries: [B, heads, M, D]. keys, values: [B, kv heads, L, D], visible where `seen` [B, 1, M, L]. own: pairs of
    [B, kv heads, M, D], of which query m sees the m-th only. Returns [B, M, heads * D].
    """
    (batch, heads, count, width), (groups, length) = queries.shape, keys.shape[1:3]
    queries = queries.view(batch, groups, heads // groups, count, width) * width**-0.5
    scores = (queries.flatten(2, 3) @ keys.transpose(2, 3)).view(batch, groups, -1, count, length)
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    if own:
        scores = torch.cat((scores, torch.stack([(queries * k[:, :, None]).sum(-1) for k, _ in own], dim=-1)), dim=-1)
    probs = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    out = (probs[..., :length].flatten(2, 3) @ values).view_as(queries)
    for step, (_, v) in enumerate(own):
        out = out + probs[..., length + step, None] * v[:, :, None]
    return out.permute(0, 3, 1, 2, 4).flatten(2)
