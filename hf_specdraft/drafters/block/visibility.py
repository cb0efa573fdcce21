"""Which keys the slots of a block see: one rule for drafting and for training."""

from __future__ import annotations

import torch
from torch import Tensor

from .configuration_block import BlockConfig


def within_window(config: BlockConfig, layer_type: str, queries: Tensor, anchors: Tensor, keys: Tensor) -> Tensor:
    """Which keys a layer's window leaves, by positions that broadcast: the slots', their blocks' anchors', and the
    keys' (-1: unused)."""
    seen = keys >= 0
    if layer_type == "sliding_attention":
        if config.sliding_rule == "distance":
            seen = seen & ((queries - keys).abs() <= config.sliding_window)
        elif config.sliding_rule == "anchor":
            seen = seen & (keys >= anchors - config.sliding_window)
        elif config.sliding_rule == "query":
            seen = seen & (keys > queries - config.sliding_window)
        if config.sliding_causal:
            seen = seen & (keys <= queries)
    return seen


def visible(config: BlockConfig, layer_type: str, block: Tensor, context: Tensor) -> Tensor:
    """Which keys each slot sees: [B, 1, S, C + S] bool.

    block: [B, S] positions of the slots, the anchor first. context: [B, C] positions of the context keys, -1 unused.
    """
    keys = torch.cat((context, block), dim=1)[:, None]  # [B, 1, C + S]
    seen = within_window(config, layer_type, block[:, :, None], block[:, :1, None], keys)
    return seen.expand(-1, block.shape[1], -1)[:, None]
