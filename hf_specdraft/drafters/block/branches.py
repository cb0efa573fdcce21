"""Training blocks that read context rows of their own beside the text's: one branch of drafting at each anchor."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from .unroll_block import Blocks, Reading, grouped_attention


class Beside:
    """A pass's `cache`: keys and values of a reading's context, and behind them those of the rows that it brings."""

    positions = None  # the pass's masks know them

    def __init__(self, reading: Reading):
        self.reading, self.keys = reading, reading.keys
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, positions: Tensor, counts: list[int]) -> None:
        """Nothing: each pass brings all of its rows."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take the rows' keys and values [B, heads, A * T, head_dim], in place of the last pass's."""
        self.new[layer] = keys, values

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, L + A * T, head_dim], the text's first."""
        keys, values = self.reading.read(layer)
        return torch.cat((keys, self.new[layer][0]), dim=2), torch.cat((values, self.new[layer][1]), dim=2)


def at_blocks(reading: Reading, blocks: Blocks) -> Reading:
    """The same reading, of other blocks: its masks are not for them."""
    other = copy.copy(reading)
    other.blocks, other.masks = blocks, {}
    return other


def branch_pass(reading: Reading, blocks: Blocks, limits: Tensor, rows: Tensor, **context) -> tuple[Tensor, Tensor]:
    """A pass over anchors and masks of `blocks`: states [n, S, H] of the drafting slots of the n real ones, and the new
    context as the layers read it.

    limits, rows: see `grouped_attention`. context: the arguments of `draft_pass` that bring context.
    """
    drafter, config = reading.drafter, reading.drafter.config
    ids = at_blocks(reading, blocks).masked()
    out = drafter.draft_pass(
        inputs_embeds=drafter.embed_blocks(ids, reading.view).flatten(1, 2),
        position_ids=blocks.positions,
        attention_mask={
            layer_type: grouped_attention(config, layer_type, reading.batch, blocks, limits, rows)
            for layer_type in {*config.layer_types}
        },
        head=False,
        **context,
    )
    drafting = slice(config.first_slot, config.first_slot + config.num_drafts)
    return out.last_hidden_state.unflatten(1, (-1, config.block_size))[blocks.real, drafting], out.context
