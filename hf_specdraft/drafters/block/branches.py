"""Training blocks that read context rows of their own beside the text's: one branch of drafting at each anchor."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from .configuration_block import BlockConfig
from .unroll_block import GROUP, Attend, Blocks, Reading
from .visibility import within_window

if TYPE_CHECKING:
    from ...training.records import TrainingBatch


class Beside:
    """A pass's `cache`: keys and values of a reading's context, and behind them those of the rows that it brings."""

    positions = None  # the pass's masks know them

    def __init__(self, reading: Reading):
        self.reading, self.keys = reading, reading.keys
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, positions: Tensor, counts: list[int]) -> None:
        """Nothing: each pass brings all of its rows."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.new[layer] = keys, values

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.reading.read(layer)
        return torch.cat((keys, self.new[layer][0]), dim=2), torch.cat((values, self.new[layer][1]), dim=2)


def at_blocks(reading: Reading, blocks: Blocks) -> Reading:
    """The same reading, of other blocks: its masks are not for them."""
    other = copy.copy(reading)
    other.blocks, other.masks = blocks, {}
    return other


def branch_attention(
    config: BlockConfig, layer_type: str, batch: TrainingBatch, blocks: Blocks, limits: Tensor, rows: Tensor
) -> Attend:
    """Attention of blocks over the context, T rows of each block's own, and itself, by torch's own with masks.

    limits: [B, A] positions that the text's context ends before. rows: [B, A, T] positions of the blocks' own rows, -1
    where there is none. Keys stand in the order [L of the context | A * T | A * size]; groups as `grouped_attention`'s.
    """
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


def branch_pass(reading: Reading, blocks: Blocks, limits: Tensor, rows: Tensor, **context) -> tuple[Tensor, Tensor]:
    """A pass over anchors and masks of `blocks`: states [n, S, H] of the drafting slots of the n real ones, and the new
    context as the layers read it.

    limits, rows: see `branch_attention`. context: the arguments of `draft_pass` that bring context.
    """
    drafter, config = reading.drafter, reading.drafter.config
    ids = at_blocks(reading, blocks).masked()
    out = drafter.draft_pass(
        inputs_embeds=drafter.embed_blocks(ids, reading.view).flatten(1, 2),
        position_ids=blocks.positions,
        attention_mask={
            layer_type: branch_attention(config, layer_type, reading.batch, blocks, limits, rows)
            for layer_type in {*config.layer_types}
        },
        head=False,
        **context,
    )
    drafting = slice(config.first_slot, config.first_slot + config.num_drafts)
    return out.last_hidden_state.unflatten(1, (-1, config.block_size))[blocks.real, drafting], out.context
