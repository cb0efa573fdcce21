"""What a slot of a block is told of its place, beside its rotary angle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from ...parts import Part

if TYPE_CHECKING:
    from .configuration_block import BlockConfig


class SlotEmbedding(Part):
    """A vector [H] for each slot behind the anchor, on top of what it holds (specfloor's drafter, 2608.27339).
    Ours is the start, N(0, 0.02): small beside an embedding."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.block_size - 1, config.hidden_size))

    def init_weights(self) -> None:
        initialization.normal_(self.weight, std=0.02)

    def forward(self, embeddings: Tensor) -> Tensor:
        """[..., block_size, H] embeddings of whole blocks, the anchor first."""
        return embeddings + F.pad(self.weight, (0, 0, 1, 0))
