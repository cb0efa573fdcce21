"""One call of a block drafter: the context it has heard of, and the drafts it makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import walkers
from ...draft import Block, Commit, Context, Draft, Features
from ...trees import from_marginals
from ...verification import argmax
from ..base import Session, TargetView

if TYPE_CHECKING:
    from .modeling_block import BlockDrafter


def ragged(counts: list[int]) -> tuple[Tensor, Tensor]:
    """(row, column) indices on the CPU of the first `counts[b]` columns of each row b."""
    columns = torch.arange(max(counts, default=0))
    return (columns < torch.tensor(counts)[:, None]).nonzero(as_tuple=True)


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made in an inference-mode call that this call, outside it, may not write to."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


class ContextCache:
    """Keys and values of the context: every row grows at its own end. The block's own are never stored.

    keys, values: per layer [B, heads, capacity, head_dim], keys with their rotary angle; zeros where unused.
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
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

    def keep(self, rows: list[int]) -> None:
        self.counts = [self.counts[row] for row in rows]
        if self.positions is not None:
            self.positions = self.positions[rows]
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]


class BlockSession(Session):
    """Rows may differ in context and may pause: features wait in `pending` until the next draft reads them in one go.

    A row whose features never came is drafted from its anchor alone: its drafts are poor, never wrong.
    """

    def __init__(self, drafter: BlockDrafter, view: TargetView, batch: int):
        self.drafter = drafter
        self.view = view
        self.cache = ContextCache(batch)
        self.memory = None if drafter.corrector is None else drafter.corrector.memory(batch)
        self.pending: list[Features] = []
        self.heard = [0] * batch  # per row, the position after the last one heard of

    def observe(self, commit: Commit) -> None:
        piece = commit.features
        if piece is None:
            return
        # A target cache that was cut back reads again what is known here.
        known = [min(n, max(0, heard - s)) for n, s, heard in zip(piece.counts, piece.start, self.heard)]
        self.heard = [max(h, s + n) if n else h for n, s, h in zip(piece.counts, piece.start, self.heard)]
        if any(known):
            column = torch.arange(piece.hidden.shape[1]) + torch.tensor(known)[:, None]
            column = column.clamp_(max=piece.hidden.shape[1] - 1).to(piece.hidden.device)
            piece = Features(
                piece.hidden.take_along_dim(column[..., None], 1),
                [n - k for n, k in zip(piece.counts, known)],
                [s + k for s, k in zip(piece.start, known)],
            )
        if any(piece.counts):
            self.pending.append(piece)

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)
        if self.memory is not None:
            self.memory.keep(rows)
        self.heard = [self.heard[row] for row in rows]
        self.pending = [
            Features(piece.hidden[rows], [piece.counts[row] for row in rows], [piece.start[row] for row in rows])
            for piece in self.pending
            if any(piece.counts[row] for row in rows)
        ]

    @torch.no_grad()
    def propose(self, context: Context) -> Draft:
        config = self.drafter.config
        depth = min(max(context.lengths, default=0), config.num_drafts)
        if depth < 1:
            return Draft.empty(len(context.lengths), self.drafter.device)
        lengths = [min(length, depth) for length in context.lengths]
        block = self.block_pass(context, slice(config.first_slot, config.first_slot + depth))
        if self.drafter.corrector is not None:
            return walkers.chain(self.drafter, self.view, self.drafter.corrector, block, context, lengths)
        return self._marginal(block, context, lengths)

    def _marginal(self, block: Block, context: Context, lengths: list[int]) -> Draft:
        """A draft of what each slot says by itself."""
        config, logits = self.drafter.config, block.logits
        if context.tree and config.tree_nodes > 0:
            log_probs = logits.log_softmax(-1, dtype=torch.float32)
            tokens, parents, valid, score = from_marginals(log_probs, context.nodes, lengths)
            confidence = score.exp().to(tokens.device, torch.float32)
            return Draft(self.drafter.target_ids(tokens), parents, valid, confidence=confidence, evidence=block)
        # The chance that the slots up to this one all hold: their largest marginals, known before any token is drawn.
        confidence = (logits.amax(-1) - logits.logsumexp(-1)).float().cumsum(-1).exp().nan_to_num(0)
        law = None
        if context.do_sample and config.draft_sampling:
            tokens, law = self.drafter.draw(self.view, logits, context)
        else:
            tokens = self.drafter.target_ids(argmax(logits))
        return Draft.chain(tokens, lengths, law=law, confidence=confidence, confidence_kind="prior", evidence=block)

    def block_pass(self, context: Context, slots: slice, ids: Tensor | None = None) -> Block:
        """Some slots of one pass over the whole block as trained.

        ids: [B, block_size] what the block holds, by default the anchor and masks. The context is read in at the first
        pass of a round; further ones find it there.
        """
        drafter, config = self.drafter, self.drafter.config
        if ids is None:
            ids = torch.full((len(context.lengths), config.block_size), config.mask_token_id, device=drafter.device)
            ids[:, 0] = context.anchor
        pending = self._take_pending()
        start = torch.tensor(context.position, device=drafter.device)
        out = drafter(
            inputs_embeds=drafter.embed(ids, self.view),
            position_ids=start[:, None] + torch.arange(config.block_size, device=drafter.device),
            cache=self.cache,
            slots=slots,
            head=False,
            **pending,
        )
        if self.memory is not None and out.context is not None:
            self.memory.observe(out.context, pending["feature_positions"], pending["counts"])
        logits = drafter.logits(self.view, out.last_hidden_state)
        return Block(logits, drafter.draft_ids, out.last_hidden_state, context.anchor.to(drafter.device), self.memory)

    def _take_pending(self) -> dict:
        """The waiting features as one left-justified piece (arguments of `forward`), which are then known."""
        if not self.pending:
            return {}
        pieces, self.pending = self.pending, []
        counts = [sum(row) for row in zip(*(piece.counts for piece in pieces))]
        positions = torch.full((len(counts), max(counts)), -1)
        hidden = pieces[0].hidden[:, : max(counts)]
        if len(pieces) > 1:
            hidden = hidden.new_zeros(*positions.shape, hidden.shape[-1])
        filled = torch.zeros(len(counts), dtype=torch.long)
        for piece in pieces:
            row, column = ragged(piece.counts)
            slot = filled[row] + column
            positions[row, slot] = torch.tensor(piece.start)[row] + column
            if len(pieces) > 1:
                row, column, slot = (index.to(hidden.device) for index in (row, column, slot))
                hidden[row, slot] = piece.hidden[row, column]
            filled += torch.tensor(piece.counts)
        weight = self.drafter.fc.weight
        return {
            "features": hidden.to(weight.device, self.drafter.dtype),
            "feature_positions": positions.to(weight.device),
            "counts": counts,
        }
