"""Keys and values of the context a block drafter has read: what it heard of, and what one draft alone reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ragged(counts: list[int]) -> tuple[Tensor, Tensor]:
    """(row, column) indices on the CPU of the first `counts[b]` columns of each row b."""
    columns = torch.arange(max(counts, default=0))
    return (columns < torch.tensor(counts)[:, None]).nonzero(as_tuple=True)


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made in an inference-mode call that this call, outside it, may not write to."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class ContextCache:
    """Keys and values of the context: every row grows at its own end. The block's own are never stored.

    keys, values: per layer [B, heads, capacity, head_dim], keys with their rotary angle; anything finite where unused.
    positions: [B, capacity] each key's position in its row, -1 where unused.
    counts: keys per row (host integers).
    """

    def __init__(self, batch: int):
        self.counts = [0] * batch
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions: Tensor | None = None

    @property
    def length(self) -> int:
        """Keys of the longest row."""
        return max(self.counts, default=0)

    def extend(self, positions: Tensor, counts: list[int]) -> None:
        """Make room for `counts[b]` more keys per row, at `positions` [B, C]; `write` then fills each layer."""
        row, column = ragged(counts)
        slot = column + torch.tensor(self.counts)[row]
        self.counts = [old + new for old, new in zip(self.counts, counts)]
        self._new = row.to(positions.device), column.to(positions.device), slot.to(positions.device)
        if self.positions is None:
            self.positions = positions.new_full((len(counts), 0), -1)
        if self.length > self.positions.shape[1]:
            # Doubling copies each key a constant number of times however long the answer grows.
            room = max(self.length + 64, 2 * self.positions.shape[1]) - self.positions.shape[1]
            self.positions = F.pad(self.positions, (0, room), value=-1)
        row, column, slot = self._new
        self.positions = writable(self.positions)
        self.positions[row, slot] = positions[row, column]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put the new context's keys and values [B, heads, C, head_dim] behind each row's old ones."""
        for store, new in ((self.keys, keys), (self.values, values)):
            if layer == len(store):
                store.append(new[:, :, :0])
            room = self.positions.shape[1] - store[layer].shape[2]
            if room:
                store[layer] = F.pad(store[layer], (0, 0, 0, room))
            store[layer] = writable(store[layer])
            row, column, slot = (index.to(new.device) for index in self._new)
            store[layer][row, :, slot] = new[row, :, column]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, `length`, head_dim]."""
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

    def crop(self, counts: list[int]) -> None:
        """Forget what stands behind the first `counts[b]` keys of each row: what one draft read, and no later may."""
        counts = [min(old, new) for old, new in zip(self.counts, counts)]
        if counts == self.counts:
            return
        column = torch.arange(self.positions.shape[1], device=self.positions.device)
        stays = column < torch.tensor(counts, device=column.device)[:, None]
        self.counts, self.positions = counts, self.positions.where(stays, -1)

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone, in this order."""
        self.counts = [self.counts[row] for row in rows]
        if self.positions is not None:
            self.positions = self.positions[rows]
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
