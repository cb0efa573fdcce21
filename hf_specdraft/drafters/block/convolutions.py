"""Short convolutions along the block, around the attention and the MLP of each layer.

A row takes in the rows before it within its block, each channel by coefficients of its own and, added to them, one that
a group of channels shares and that depends on the row's state. Context rows are not convolved. Sources: DFlash 2 (no
paper; NVIDIA Model-Optimizer's and z-lab's modules); the prefix-attention drafter of "information floors" (specfloor).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from ...parts import Part
from .configuration_block import BlockConfig


class BlockConvolution(Part):
    """Two convolutions around a sublayer, before and behind it, inside its residual branch. Starts as the identity.

    y_t = sum_j (base[side, j] + dynamic[side, j, group of the channel]) x_{t-j}, j < taps, x = 0 before the block.

    taps: rows that each row sees, its own included. group_size: channels that share a dynamic coefficient.
    dynamic_from: what the second side's dynamic coefficients are computed from: "input", the state before the sublayer
        (before its convolution), as the first side's (DFlash 2); or "output", the sublayer's (prefix attention).
    Raises ValueError for options that fit no layer.
    """

    def __init__(self, config: BlockConfig, taps: int = 2, group_size: int = 16, dynamic_from: str = "input"):
        super().__init__()
        hidden_size, block_size = config.hidden_size, config.block_size
        if not 1 <= taps <= block_size:
            raise ValueError(f"convolution taps must be 1 to the block_size of {block_size}, got {taps}")
        if group_size < 1 or hidden_size % group_size:
            raise ValueError(f"convolution group_size {group_size} must divide the hidden_size {hidden_size}")
        if dynamic_from not in ("input", "output"):
            raise ValueError(f"convolution dynamic_from must be 'input' or 'output', got {dynamic_from!r}")
        self.block_size, self.taps, self.group_size, self.dynamic_from = block_size, taps, group_size, dynamic_from
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * hidden_size // group_size, bias=False)

    def init_weights(self) -> None:
        """The identity."""
        initialization.zeros_(self.kernel_projection.weight)
        identity = torch.zeros_like(self.base_kernel)
        identity[:, 0] = 1
        initialization.copy_(self.base_kernel, identity)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, n * block_size, H], normed -> the sublayer's output between the two convolutions, of the same shape."""
        before, behind = self.kernel_projection(x).chunk(2, dim=-1)
        y = sublayer(self._convolve(x, before, 0))
        if self.dynamic_from == "output":
            behind = self.kernel_projection(y).chunk(2, dim=-1)[1]
        return self._convolve(y, behind, 1)

    def _convolve(self, x: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """x [B, T, H], dynamic [B, T, taps * H / group_size] -> [B, T, H]."""
        blocks = x.unflatten(1, (-1, self.block_size))
        dynamic = dynamic.unflatten(-1, (self.taps, -1)).repeat_interleave(self.group_size, dim=-1)
        kernel = (self.base_kernel[side] + dynamic).unflatten(1, (-1, self.block_size))  # [B, n, block_size, taps, H]
        out = kernel[..., 0, :] * blocks
        for tap in range(1, self.taps):
            earlier = F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size]
            out = out + kernel[..., tap, :] * earlier
        return out.flatten(1, 2)
