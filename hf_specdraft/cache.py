"""The only editor of caches: drop a tail, keep one path of a tree, re-align rows, let finished rows go.

Rows of a batch commit different numbers of tokens. After every round they are again an ordinary left-padded batch:
row b's entries end in the last column, and what lies before them is masked. Columns then differ between two entries of
a row exactly as positions do, so sliding windows and every attention implementation work as for plain generate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

# Layers whose whole state is keys and values by column. Others (quantised, indexed, recurrent) may still be cropped
# when they say so, but not re-aligned.
_DYNAMIC = (DynamicLayer, DynamicSlidingWindowLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)


class RowCache:
    """A transformers cache seen as left-padded rows.

    cache: the cache itself, edited in place, never replaced.
    columns: entries of the longest row.
    start: per row, the first column that is not left padding.
    mask: [B, columns] the 2-D attention mask, or None while every entry of every row is visible.
    """

    def __init__(self, cache: Cache, batch: int, mask: Tensor | None):
        self.cache = cache
        self.columns = int(cache.get_seq_length())
        self.mask = None if mask is None else mask[:, : self.columns]
        self.start = [0] * batch if mask is None else self.mask.long().argmax(-1).tolist()
        # Zeros inside a row (right-padded prompts, padded turns of a chat) stay where they are, `holes` per row.
        live = [self.columns] * batch if mask is None else self.mask.sum(-1).tolist()
        self.holes = [self.columns - s - n for s, n in zip(self.start, live)]

    @property
    def batch(self) -> int:
        return len(self.start)

    @property
    def lengths(self) -> list[int]:
        """Tokens each row holds, which is also the position of its next one."""
        return [self.columns - s - h for s, h in zip(self.start, self.holes)]

    @property
    def is_static(self) -> bool:
        return any(isinstance(layer, StaticLayer) for layer in self.cache.layers)

    def room(self) -> int | None:
        """Columns that still fit, None when the cache grows."""
        limits = [layer.max_cache_len for layer in self.cache.layers if isinstance(layer, StaticLayer)]
        return min(limits) - self.columns if limits else None

    def mask_for(self, width: int) -> Tensor | None:
        """[B, columns + width] 2-D mask of a pass over `width` new columns, None when nothing is masked."""
        if self.mask is None:
            return None
        return torch.cat([self.mask, self.mask.new_ones(self.batch, width)], dim=-1)

    def commit(self, width: int, kept: list[list[int]], rows: list[int] | None = None) -> None:
        """After a pass over `width` columns, keep of row b only columns `kept[b]` (ascending offsets into the pass).

        rows: the rows that go on, in order; None keeps all.
        """
        alive = range(self.batch) if rows is None else rows
        counts = [len(offsets) for offsets in kept]
        if rows is None and len(set(counts)) == 1:
            count = counts[0]
            if any(offsets != list(range(count)) for offsets in kept):
                self._pack(kept, count)
            self.cache.crop(count - width)
            if self.mask is not None:
                self.mask = self.mask_for(count)
            self.columns += count
            return
        start = torch.tensor([self.start[b] for b in alive])
        most = max(max(counts), 1)
        offsets = torch.tensor([kept[b] + [0] * (most - counts[b]) for b in alive])
        length = self.columns - start + torch.tensor([counts[b] for b in alive])
        new_columns = int(length.max())
        new_start = new_columns - length
        # Entry c of a row comes from its old column, or, past the old end, from the kept columns of this pass.
        source = torch.arange(new_columns) + (start - new_start)[:, None]
        beyond = (source - self.columns).clamp(min=0, max=offsets.shape[1] - 1)
        index = torch.where(source < self.columns, source, self.columns + offsets.gather(1, beyond)).clamp(min=0)
        self._gather(self.columns + width, index, rows)
        self._realign_mask(width, index, new_start, rows)
        self.columns, self.start = new_columns, new_start.tolist()
        self.holes = [self.holes[b] for b in alive]

    def _realign_mask(self, width: int, index: Tensor, start: Tensor, rows: list[int] | None) -> None:
        if any(self.holes):
            full = self.mask_for(width) if rows is None else self.mask_for(width)[rows]
            full = full.gather(1, index.to(full.device))
        elif bool(start.any()):
            full = torch.ones(index.shape, dtype=torch.long, device=_device(self.cache))
        else:
            self.mask = None
            return
        self.mask = full * (torch.arange(index.shape[1]) >= start[:, None]).to(full.device)

    def cut(self, counts: list[int]) -> None:
        """Forget the last `counts[b]` entries of each row."""
        width = max(counts)
        if not width:
            return
        self.columns -= width
        if self.mask is not None:
            self.mask = self.mask[:, : self.columns]
        self.commit(width, [list(range(width - count)) for count in counts])

    def lay_out(self, start: list[int], columns: int) -> None:
        """Move every row so that it begins at column `start[b]` of `columns`: the layout plain generate leaves, where
        rows that finished early are followed by dead columns. What does not fit is dropped from the end."""
        if self.start == start and self.columns == columns:
            return
        index = torch.zeros(self.batch, columns, dtype=torch.long)
        for b in range(self.batch):
            length = min(self.columns - self.start[b], columns - start[b])
            index[b, start[b] : start[b] + length] = torch.arange(self.start[b], self.start[b] + length)
        self._gather(self.columns, index, None)
        self.columns, self.start, self.mask = columns, start, None

    def _pack(self, kept: list[list[int]], count: int) -> None:
        """Move each row's kept columns to the front of the pass, in place; the pass's tail is cropped afterwards."""
        offsets = torch.tensor(kept)
        for layer in self.cache.layers:
            if isinstance(layer, DummyLayer) or not layer.is_initialized:
                continue
            end = self.columns if isinstance(layer, StaticLayer) else layer.keys.shape[-2] - self._width(layer)
            for states in (layer.keys, layer.values):
                source = (end + offsets).to(states.device)
                batch = torch.arange(len(kept), device=states.device)
                # [B, count, heads, D]: the right side is a copy, so overlapping moves are safe.
                states[:, :, end : end + count] = states[batch[:, None], :, source].transpose(1, 2)

    def _width(self, layer: DynamicLayer) -> int:
        return int(layer.get_seq_length()) - self.columns

    def _gather(self, total: int, index: Tensor, rows: list[int] | None) -> None:
        """Rebuild every layer from columns `index` [R, columns'] of the `total` there are (entries to be masked may
        point anywhere)."""
        columns = index.shape[1]
        for layer in self.cache.layers:
            if isinstance(layer, DummyLayer) or not layer.is_initialized:
                continue
            static = isinstance(layer, StaticLayer)
            offset = 0 if static else total - layer.keys.shape[-2]
            kept = columns
            if type(layer) is DynamicSlidingWindowLayer:
                # Only the window is stored; a row never needs older columns than its own last window - 1.
                kept = min(columns, layer.sliding_window - 1)
                layer.cumulative_length = columns
            device = layer.keys.device
            source = (index[:, columns - kept :] - offset).clamp(min=0).to(device)
            batch = torch.arange(self.batch, device=device) if rows is None else torch.tensor(rows, device=device)
            heads = torch.arange(layer.keys.shape[1], device=device)
            where = (batch[:, None, None], heads[None, :, None], source[:, None, :])
            if static:
                layer.keys[:, :, :kept] = layer.keys[where]
                layer.values[:, :, :kept] = layer.values[where]
                layer.cumulative_length.fill_(columns)
                if type(layer) is StaticSlidingWindowLayer:
                    layer.cumulative_length_int = columns
            else:
                layer.keys, layer.values = layer.keys[where], layer.values[where]


def _device(cache: Cache) -> torch.device:
    return next(layer.keys.device for layer in cache.layers if getattr(layer, "is_initialized", False))


def refuse_uncuttable(cache: Cache | None) -> None:
    """Raise ValueError for a cache that speculation cannot rewind, before any token is drafted."""
    if cache is None:
        raise ValueError(
            "speculative decoding needs a cache to rewind, but this call has none; leave use_cache at True and use a "
            "target that supports transformers' caches"
        )
    if isinstance(cache, EncoderDecoderCache):
        raise ValueError("encoder-decoder caches are handled by transformers' own assisted loop")
    if not cache.is_croppable:
        raise ValueError(
            f"the target's cache cannot be cut back after a rejected draft ({_odd_layers(cache)}). Recurrent, hybrid "
            "and quantised caches, and static caches shorter than the text on sliding-window layers, are refused; use "
            "cache_implementation=None (dynamic) on an attention-only target, or generate without assistant_model"
        )


def make_room(cache: Cache | None, longest: int, width: int) -> None:
    """Let a static cache that has no memory yet hold a pass of `width` columns beyond the longest row: every row of a
    batch ends in the last column. Raises ValueError for one that cannot hold a pass of one column."""
    layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StaticLayer)]
    for layer in layers:
        if type(layer) is StaticLayer and not layer.is_initialized:
            layer.max_cache_len = max(layer.max_cache_len, longest + width)
    held = min((layer.max_cache_len for layer in layers), default=None)
    if held is not None and held <= longest:
        raise ValueError(
            f"the static cache has {held} columns, but to re-align rows of a batch after uneven acceptance it needs "
            f"{longest + 1}; pass max_cache_len={longest + width}, or use the default dynamic cache"
        )


def can_realign(cache: Cache) -> bool:
    """Whether rows can be re-aligned and tree paths packed (needed for batches and trees, not for one row's chain)."""
    return all(type(layer) in (*_DYNAMIC, *_STATIC) or isinstance(layer, DummyLayer) for layer in cache.layers)


def _odd_layers(cache: Cache) -> str:
    names = {type(layer).__name__ for layer in cache.layers if not getattr(layer, "is_croppable", False)}
    return ", ".join(sorted(names)) or type(cache).__name__


def record_past(cache: Cache, on: bool) -> None:
    """Make window layers keep what a rejected draft pushed out, or stop doing so before the cache is handed back."""
    if on:
        cache.activate_past_recording()
        return
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
