"""Training blocks: one at each of many anchors of a batch, all in one pass over context that is computed once.

Further modes, of drafters that pass over a block more than once, are modules `unroll_<mode>` beside this one; they are
found by looking. Each has `unroll(reading, generator, **options) -> Unrolled`, and may have `check(**options)`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from ...parts import refuse_unknown
from ...training.anchors import choose_anchors, following
from ...training.records import FusedContext, TrainingBatch, Unrolled
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
    mode: str | dict[str, Any] | None = None,
) -> Unrolled:
    """What the drafter's blocks would say at `anchors` anchors of each document (None: at all of them).

    Each anchor starts a block of its own, which sees what it sees in drafting: the features of its document before the
    anchor and itself, under each layer's window. S is config.num_drafts.
    implementation: "sdpa" (any device), "flex" (FlexAttention, which has no gradient on the CPU), or "auto": flex on
        CUDA, else sdpa.
    generator: draws the anchors, see `choose_anchors`, and what a mode draws.
    mode: what is made of the blocks: "plain" (one pass over masks), the name of another mode, or {"name": ..., and its
        options}. None: what the drafter's config drafts with (`BlockConfig.unroll_mode`).
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
    unroll, options = resolve_mode(config.unroll_mode if mode is None else mode)
    batch = batch.to(drafter.device)
    blocks = Blocks.of(batch, choose_anchors(batch, anchors, generator), config.block_size)
    return unroll(Reading(drafter, view, batch, blocks, implementation), generator, **options)


def unroll_plain(reading: Reading, generator: torch.Generator | None) -> Unrolled:
    """One pass over the anchors and masks."""
    return replace(reading.unrolled(reading.states(reading.masked())), blocks=reading.whole)


def resolve_mode(mode: str | dict[str, Any]) -> tuple[Callable[..., Unrolled], dict[str, Any]]:
    """A mode as a recipe gives it -> its function and options. Raises ValueError for unknown ones, and for values that
    the mode's module refuses by a `check(**options)`."""
    modules = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    known = {"plain", *(name.removeprefix("unroll_") for name in modules if name.startswith("unroll_"))} - {"block"}
    options = {"name": mode} if isinstance(mode, str) else dict(mode)
    name = options.pop("name", None)
    if name not in known:
        raise ValueError(f"unroll.mode must be one of {', '.join(sorted(known))}, got {name!r}")
    module = None if name == "plain" else importlib.import_module(f"{__package__}.unroll_{name}")
    unroll = unroll_plain if module is None else module.unroll
    refuse_unknown(f"unroll.mode {name}", options, unroll, 2)
    getattr(module, "check", lambda **given: None)(**options)
    return unroll, options


class Reading:
    """Passes over some blocks of a batch (which is on the drafter's device). The first reads the context; further ones
    find its keys and values there, as in a round of drafting, and send their gradients into them.

    It is the `cache` of those passes: keys, values: per layer [B, heads, L, head_dim].
    """

    positions = None  # the passes' masks know them

    def __init__(
        self,
        drafter: BlockDrafter,
        view: TargetView,
        batch: TrainingBatch,
        blocks: Blocks,
        implementation: str = "auto",
    ):
        self.drafter, self.view, self.batch, self.blocks = drafter, view, batch, blocks
        config, device = drafter.config, batch.input_ids.device
        if implementation == "auto":
            # The compiled kernel needs a head of at least 16.
            implementation = "flex" if device.type == "cuda" and config.head_dim >= 16 else "sdpa"
        attend = {"sdpa": grouped_attention, "flex": flex_attention}[implementation]
        self.masks = {layer_type: attend(config, layer_type, batch, blocks) for layer_type in {*config.layer_types}}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.fused: Tensor | None = None  # [B, L, H] the context as the layers read it
        self.whole: Tensor | None = None  # [n, size, H] all slots' states of the last pass, for a length head

    def extend(self, positions: Tensor, counts: list[int]) -> None:
        """Nothing: the context of a reading is whole at once."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take the context's keys and values [B, heads, L, head_dim] of the next layer."""
        self.keys.append(keys)
        self.values.append(values)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """The context's keys and values [B, heads, L, head_dim]."""
        return self.keys[layer], self.values[layer]

    def masked(self) -> Tensor:
        """[B, A, size] what blocks hold in a first pass: their anchors, and masks."""
        shape = (*self.blocks.columns.shape, self.blocks.size)
        ids = torch.full(shape, self.drafter.config.mask_token_id, device=self.batch.input_ids.device)
        ids[..., 0] = self.batch.input_ids.gather(1, self.blocks.columns)
        return ids

    def states(self, ids: Tensor | None = None, embeddings: Tensor | None = None) -> Tensor:
        """A pass over blocks of `ids` [B, A, size], or of their embeddings [B, A, size, H]: the states [n, S, H] of the
        drafting slots of the n real blocks, row by row."""
        drafter, config = self.drafter, self.drafter.config
        new = {}
        if not self.keys:
            new = {"features": self.batch.features.to(drafter.dtype), "feature_positions": self.batch.position_ids}
        out = drafter.draft_pass(
            inputs_embeds=(drafter.embed_blocks(ids, self.view) if embeddings is None else embeddings).flatten(1, 2),
            position_ids=self.blocks.positions,
            cache=self,
            attention_mask=self.masks,
            head=False,
            **new,
        )
        self.fused = out.context if new else self.fused
        drafting = slice(config.first_slot, config.first_slot + config.num_drafts)
        states = out.last_hidden_state.unflatten(1, (-1, self.blocks.size))
        if drafter.length_head is not None:
            self.whole = states[self.blocks.real].detach()
        return states[self.blocks.real, drafting]

    def unrolled(self, hidden: Tensor) -> Unrolled:
        """States [n, S, H] of the real blocks, and what they should say."""
        batch, columns = self.batch, self.blocks.columns
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        starts = (rows * batch.input_ids.shape[1] + columns)[self.blocks.real]
        labels, before, mask = following(batch, starts, self.drafter.config.num_drafts)
        previous = torch.cat((batch.input_ids.flatten()[starts, None], labels[:, :-1]), dim=1)
        context = FusedContext(self.fused, batch.document_ids, batch.position_ids)
        return Unrolled(hidden, labels, before, mask, anchors=starts, previous=previous, context=context)


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
        return cls.at(batch, columns, torch.arange(most, device=chosen.device) < counts[:, None], size)

    @classmethod
    def at(cls, batch: TrainingBatch, columns: Tensor, real: Tensor, size: int) -> Blocks:
        """columns, real: [B, A], see Blocks."""
        anchors, documents = (
            part.gather(1, columns).where(real, 0).repeat_interleave(size, dim=1)
            for part in (batch.position_ids, batch.document_ids)
        )
        ahead = torch.arange(size, device=columns.device).repeat(columns.shape[1])
        return cls(size, columns, real, anchors + ahead, anchors, documents)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_attention(
    config: BlockConfig,
    layer_type: str,
    batch: TrainingBatch,
    blocks: Blocks,
    limits: Tensor | None = None,
    rows: Tensor | None = None,
) -> Attend:
    """Attention of the blocks by torch's own with masks, a group of neighbouring blocks at a time: over the context
    that any of them may see, T rows of each block's own, and the group. Memory grows with anchors x (context + GROUP),
    not with anchors squared.

    limits: [B, A] positions that the text's context ends before; None for the anchors'.
    rows: [B, A, T] positions of the blocks' own rows, -1 where there is none; None for no such rows. Keys stand in the
    order [L of the context | A * T | A * size].
    """
    limits = blocks.anchors[:, :: blocks.size] if limits is None else limits
    rows = limits.new_zeros((*limits.shape, 0)) if rows is None else rows
    width, step, own = batch.input_ids.shape[1], max(1, GROUP // blocks.size), rows.shape[2]
    begins = blocks.columns - blocks.anchors[:, :: blocks.size]  # of each anchor's document
    first = begins.where(blocks.real, width).amin(0).tolist()
    last = (begins + limits).where(blocks.real, 0).amax(0).tolist()
    groups = []
    for start in range(0, len(first), step):
        some = slice(start, start + step)
        context = slice(min(first[some]), max(last[some]))
        slots = slice(start * blocks.size, (start + step) * blocks.size)
        queries, anchors, documents = (
            part[:, slots, None] for part in (blocks.positions, blocks.anchors, blocks.documents)
        )
        keys, before = batch.position_ids[:, None, context], limits[:, some].repeat_interleave(blocks.size, 1)
        text = (keys < before[..., None]) & (batch.document_ids[:, None, context] == documents)
        text = text & within_window(config, layer_type, queries, anchors, keys)
        number = torch.arange(queries.shape[1], device=queries.device) // blocks.size
        owner = torch.arange(rows[:, some].shape[1], device=queries.device).repeat_interleave(own)
        extra = rows[:, some].flatten(1)[:, None]
        extra = (number[:, None] == owner) & within_window(config, layer_type, queries, anchors, extra)
        same = (number[:, None] == number) & within_window(config, layer_type, queries, anchors, queries.mT)
        mask = torch.cat((text, extra, same), dim=2)[:, None]
        groups.append((context, slice(start * own, (start + step) * own), slots, mask))
    behind = width + rows.shape[1] * own

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        outs = []
        for context, extra, slots, mask in groups:
            k, v = (
                torch.cat((x[:, :, context], x[:, :, width:behind][:, :, extra], x[:, :, behind:][:, :, slots]), dim=2)
                for x in (keys, values)
            )
            outs.append(F.scaled_dot_product_attention(queries[:, :, slots], k, v, attn_mask=mask, enable_gqa=True))
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
