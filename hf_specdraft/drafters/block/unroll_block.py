"""Training blocks: one at each of many anchors of a batch, all in one pass over context that is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from ...training.anchors import choose_anchors, following
from ...training.records import TrainingBatch, Unrolled
from ..base import TargetView
from .configuration_block import BlockConfig
from .visibility import within_window

if TYPE_CHECKING:
    from .modeling_block import BlockDrafter

# Queries that attend in one call of torch's attention: few enough that blocks of the group waste little on each other,
# enough that the call is worth its overhead.
GROUP = 256


def unroll_block(
    drafter: BlockDrafter,
    view: TargetView,
    batch: TrainingBatch,
    anchors: int | None = 512,
    implementation: str = "auto",
    generator: torch.Generator | None = None,
) -> Unrolled:
    """What the drafter's blocks would say at `anchors` anchors of each document (None: at all of them).

    Each anchor starts a block of its own, which sees what it sees in drafting: the features of its document before the
    anchor and itself, under each layer's window. S is config.num_drafts.
    implementation: "sdpa" (any device), "flex" (FlexAttention, which has no gradient on the CPU), or "auto": flex on
        CUDA, else sdpa.
    generator: draws the anchors, see `choose_anchors`.
    Raises ValueError when the batch has no features, or an option is none of these.
    """
    config = drafter.config
    if batch.features is None:
        raise ValueError(
            "a block drafter reads the target's hidden states, but the batch has none; fill in batch.features "
            f"(layers {', '.join(map(str, drafter.feature_layers))}) first"
        )
    if implementation not in ("auto", "sdpa", "flex"):
        raise ValueError(f"implementation must be 'auto', 'sdpa' or 'flex', got {implementation!r}")
    device = drafter.device
    batch = batch.to(device)
    blocks = Blocks.of(batch, choose_anchors(batch, anchors, generator), config.block_size)
    if implementation == "auto":
        # The compiled kernel needs a head of at least 16.
        implementation = "flex" if device.type == "cuda" and config.head_dim >= 16 else "sdpa"
    ids = torch.full((*blocks.columns.shape, config.block_size), config.mask_token_id, device=device)
    ids[..., 0] = batch.input_ids.gather(1, blocks.columns)
    attend = {"sdpa": grouped_attention, "flex": flex_attention}[implementation]
    hidden = drafter.draft_pass(
        inputs_embeds=drafter.embed(ids.flatten(1), view),
        features=batch.features.to(drafter.dtype),
        feature_positions=batch.position_ids,
        position_ids=blocks.positions,
        attention_mask={layer_type: attend(config, layer_type, batch, blocks) for layer_type in {*config.layer_types}},
        head=False,
    ).last_hidden_state
    drafting = slice(config.first_slot, config.first_slot + config.num_drafts)
    hidden = hidden.unflatten(1, (-1, config.block_size))[blocks.real, drafting]
    rows = torch.arange(len(ids), device=device)[:, None]
    starts = (rows * batch.input_ids.shape[1] + blocks.columns)[blocks.real]
    labels, before, mask = following(batch, starts, config.num_drafts)
    previous = torch.cat((batch.input_ids.flatten()[starts, None], labels[:, :-1]), dim=1)
    return Unrolled(hidden, labels, before, mask, anchors=starts, previous=previous)


@dataclass
class Blocks:
    """The blocks of a batch, A a row (one at least), each of `size` slots; rows with fewer anchors are filled up.

    columns: [B, A] of the anchors, ascending. real: [B, A] bool, False for what fills up: blocks that see themselves
    only. positions, anchors, documents: [B, A * size] per slot its position, its anchor's, and its document (0 none).
    """

    size: int
    columns: Tensor
    real: Tensor
    positions: Tensor
    anchors: Tensor
    documents: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, chosen: Tensor, size: int) -> Blocks:
        """chosen: [B, L] bool, the anchors."""
        counts = chosen.sum(1)
        most = max(1, int(counts.max()))
        columns = (~chosen).long().argsort(dim=1, stable=True)[:, :most]
        real = torch.arange(most, device=chosen.device) < counts[:, None]
        anchors, documents = (
            part.gather(1, columns).where(real, 0).repeat_interleave(size, dim=1)
            for part in (batch.position_ids, batch.document_ids)
        )
        ahead = torch.arange(size, device=chosen.device).repeat(most)
        return cls(size, columns, real, anchors + ahead, anchors, documents)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_attention(config: BlockConfig, layer_type: str, batch: TrainingBatch, blocks: Blocks) -> Attend:
    """Attention of the blocks by torch's own with masks, a group of neighbouring blocks at a time: over the context
    that any of them may see, and the group. Memory grows with anchors x (context + GROUP), not with anchors squared."""
    width, step = batch.input_ids.shape[1], max(1, GROUP // blocks.size)
    # The first column of each anchor's document, and the anchor's own, which the context ends before.
    first = (blocks.columns - blocks.anchors[:, :: blocks.size]).where(blocks.real, width).amin(0).tolist()
    last = blocks.columns.where(blocks.real, 0).amax(0).tolist()
    groups = []
    for start in range(0, len(first), step):
        context = slice(min(first[start : start + step]), max(last[start : start + step]))
        own = slice(start * blocks.size, (start + step) * blocks.size)
        queries, anchors, documents = (
            part[:, own, None] for part in (blocks.positions, blocks.anchors, blocks.documents)
        )
        keys = batch.position_ids[:, None, context]
        before = (keys < anchors) & (batch.document_ids[:, None, context] == documents)
        before = before & within_window(config, layer_type, queries, anchors, keys)
        index = torch.arange(queries.shape[1], device=queries.device) // blocks.size
        same = (index[:, None] == index) & within_window(config, layer_type, queries, anchors, queries.mT)
        groups.append((context, own, torch.cat((before, same), dim=2)[:, None]))

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        outs = []
        for context, own, mask in groups:
            k, v = (torch.cat((x[:, :, context], x[:, :, width:][:, :, own]), dim=2) for x in (keys, values))
            outs.append(F.scaled_dot_product_attention(queries[:, :, own], k, v, attn_mask=mask, enable_gqa=True))
        return torch.cat(outs, dim=2)

    return attend


def flex_attention(config: BlockConfig, layer_type: str, batch: TrainingBatch, blocks: Blocks) -> Attend:
    """The same by FlexAttention, which skips what no block of 128 queries sees."""
    compiled = blocks.columns.device.type != "cpu"
    if not compiled and torch.is_grad_enabled():
        raise ValueError("FlexAttention has no gradient on the CPU; use implementation='sdpa' there")
    width, size = batch.input_ids.shape[1], blocks.size
    positions = torch.cat((batch.position_ids, blocks.positions), dim=1)
    documents = torch.cat((batch.document_ids, blocks.documents), dim=1)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor, position = blocks.anchors[row, query], positions[row, key]
        before = (key < width) & (position < anchor) & (documents[row, key] == blocks.documents[row, query])
        own = (key >= width) & ((key - width) // size == query // size)
        return (before | own) & within_window(config, layer_type, blocks.positions[row, query], anchor, position)

    shape = (len(positions), None, blocks.positions.shape[1], positions.shape[1])
    mask = flex.create_block_mask(sees, *shape, device=positions.device, _compile=compiled)
    return partial(_compiled_flex() if compiled else flex.flex_attention, block_mask=mask, enable_gqa=True)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex.flex_attention)
