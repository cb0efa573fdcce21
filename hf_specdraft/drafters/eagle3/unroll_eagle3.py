"""EAGLE-3's training-time test (2503.01840): what each draft of a text would be, fed its own states and the text's
tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...training.anchors import choose_anchors, following
from ...training.records import TrainingBatch, Unrolled
from ..base import TargetView

if TYPE_CHECKING:
    from .modeling_eagle3 import Eagle3Drafter


def unroll_eagle3(
    drafter: Eagle3Drafter,
    view: TargetView,
    batch: TrainingBatch,
    steps: int | None = None,
    anchors: int | None = 512,
    generator: torch.Generator | None = None,
) -> Unrolled:
    """Drafts of `steps` tokens (by default num_assistant_tokens) from `anchors` anchors of each document (None: all).

    Step i's row of an anchor sees the rows with features up to the anchor's, and its own rows of steps 1 to i: what the
    cache holds in decoding. generator: draws the anchors, see `choose_anchors`. Raises ValueError for steps below 1 or
    a batch without features.
    """
    steps = drafter.config.num_assistant_tokens if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if batch.features is None:
        raise ValueError(
            "an EAGLE-3 drafter reads the target's hidden states, but the batch has none; fill in batch.features "
            f"(layers {', '.join(map(str, drafter.feature_layers))}) first"
        )
    batch = batch.to(drafter.device)
    ids, documents = batch.input_ids, batch.document_ids
    columns = ids.shape[1]
    # The row before the anchor's, with features, ends in it.
    at, real = _columns(choose_anchors(batch, anchors, generator) & (batch.position_ids > 0))
    row = torch.arange(len(ids), device=ids.device)[:, None]

    def at_anchors(x: Tensor) -> Tensor:
        return x[row, at - 1]

    seen = torch.arange(columns, device=ids.device) < at[:, :, None]
    seen = (seen & (documents[:, None] == documents[row, at - 1][:, :, None]))[:, None]  # [B, 1, A, L]
    window = torch.arange(drafter.config.token_window, device=ids.device)

    def embeds_of(at: Tensor, first: Tensor) -> Tensor:
        """[B, T, w * H] of the tokens at columns `at` [B, T] and those before them, back to column `first`."""
        columns = (at[..., None] - window).maximum(first[..., None])
        return drafter.embed(ids[row[..., None], columns], view)

    column = torch.arange(columns, device=ids.device).expand_as(ids)
    start = column - batch.position_ids  # of each column's document
    embeds = embeds_of((column + 1).clamp(max=columns - 1), start)
    x = drafter.fuse(batch.features.to(drafter.dtype), embeds)
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
        embeds = embeds_of((at + step).clamp(max=columns - 1), start[row, at])
        x = drafter.resume(out.state, embeds)
        rope = drafter.rotary_emb(x, positions + step)
        for layer, (keys, values), own in zip(drafter.layers, stable, drafted):
            residual, normed = layer.read(x, embeds)
            own.append(layer.self_attn.keys_values(normed, rope))
            x = layer.write(residual, attend(layer.self_attn.queries(normed, rope), keys, values, seen, own))
        out = drafter.finish(x)
        hidden.append(out.last_hidden_state)
    starts = (columns * row + at)[real]
    return Unrolled(torch.stack(hidden, dim=2)[real], *following(batch, starts, steps), anchors=starts)


def _columns(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Columns [B, A] of each row's anchors (A is one at least), and which of them are real; the rest are column 1."""
    counts = chosen.sum(1)
    order = (~chosen).long().argsort(dim=1, stable=True)[:, : max(1, int(counts.max()))]
    real = torch.arange(order.shape[1], device=order.device) < counts[:, None]
    return order.where(real, 1), real


def _causal(documents: Tensor) -> Tensor:
    """[B, 1, L, L] bool: the columns of the same document up to each column."""
    same = documents[:, None] == documents[:, :, None]
    return same.tril()[:, None]


def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of anchors to shared keys, and to keys of their own.

    queries: [B, heads, A, D]. keys, values: [B, kv heads, L, D], visible where `seen` [B, 1, A, L]. own: pairs of
    [B, kv heads, A, D], of which query a sees the a-th only. Returns [B, A, heads * D].
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
