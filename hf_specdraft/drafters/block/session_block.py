"""One call of a block drafter: the context it has heard of, and the drafts it makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import walkers
from ...draft import Block, Commit, Context, Draft, Features
from ...trees import from_marginals
from ...verification import argmax
from ..base import Session, TargetView
from .context_cache import ContextCache, ragged
from .editing import edited_block
from .predraft import History
from .stages import draft_stages

if TYPE_CHECKING:
    from .modeling_block import BlockDrafter


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
        # Of the last round, for a drafter that carries them over; the same while no pass of a draft has read them.
        self.rejected: Features | None = None
        self.carrying: Features | None = None
        self.temporary: dict = {}  # further context of the next pass (its arguments), which this draft alone reads
        self.heard = [0] * batch  # per row, the position after the last one heard of
        self.history = None if drafter.predraft is None else History(batch)

    def observe(self, commit: Commit) -> None:
        if self.memory is not None:
            self.memory.hear(commit.tokens)
        if self.history is not None:
            self.history.hear([len(tokens) for tokens in commit.tokens])
        self.rejected = commit.rejected if commit.rejected is not None and any(commit.rejected.counts) else None
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
        if self.history is not None:
            self.history.keep(rows)
        self.heard = [self.heard[row] for row in rows]

        def kept(pieces: list[Features]) -> list[Features]:
            return [
                Features(piece.hidden[rows], [piece.counts[row] for row in rows], [piece.start[row] for row in rows])
                for piece in pieces
                if any(piece.counts[row] for row in rows)
            ]

        self.pending = kept(self.pending)
        self.rejected = next(iter(kept([] if self.rejected is None else [self.rejected])), None)

    @torch.no_grad()
    def outlook(self) -> Tensor | None:
        drafter = self.drafter
        if drafter.predraft is None:
            return None
        fused = torch.zeros(len(self.heard), drafter.config.hidden_size, dtype=drafter.dtype, device=drafter.device)
        for piece in self.pending:  # the latest stand last
            rows = [b for b, count in enumerate(piece.counts) if count]
            last = piece.hidden[rows, [piece.counts[b] - 1 for b in rows]]
            fused[rows] = drafter.fused(last.to(drafter.device, drafter.dtype))
        recent, position = (torch.tensor(x, device=drafter.device) for x in (self.history.recent, self.heard))
        return drafter.predraft.survival(fused, recent, position)

    @torch.no_grad()
    def propose(self, context: Context) -> Draft:
        if max(context.lengths, default=0) < 1:
            return Draft.empty(len(context.lengths), self.drafter.device)
        if self.history is not None:
            self.history.drafted = list(context.lengths)
        lasting = [old + sum(p.counts[b] for p in self.pending) for b, old in enumerate(self.cache.counts)]
        self.carrying = self.rejected
        draft = draft_stages(self, context)
        self.cache.crop(lasting)
        return draft

    def draft_block(self, context: Context) -> Draft:
        """A draft of one block: its rows go no deeper, whatever is asked for."""
        config = self.drafter.config
        depth = min(max(context.lengths), config.num_drafts)
        lengths = [min(length, depth) for length in context.lengths]
        if config.edit_passes:
            block = edited_block(self, context, depth)
        else:
            block = self.block_pass(context, slice(config.first_slot, config.first_slot + depth))
        if self.drafter.corrector is not None:
            return walkers.walk(self.drafter, self.view, self.drafter.corrector, block, context, lengths)
        return self._marginal(block, context, lengths)

    def _marginal(self, block: Block, context: Context, lengths: list[int]) -> Draft:
        """A draft of what each slot says by itself."""
        config, logits = self.drafter.config, block.logits
        if context.tree and config.tree_nodes > 0:
            log_probs = logits.log_softmax(-1, dtype=torch.float32)
            tokens, parents, valid, score = from_marginals(log_probs, context.nodes, lengths)
            confidence = score.exp().to(tokens.device, torch.float32)
            return Draft(self.drafter.target_ids(tokens), parents, valid, confidence=confidence, evidence=block)
        # The chance that the slots up to this one all hold, known before any token is drawn: by the head that was
        # trained to tell (which reads no token where no corrector is), or their largest marginals.
        if (head := self.drafter.confidence) is not None:
            block = replace(block, confidence=head(self.drafter, self.view, block.hidden, None))
            confidence = head.survival(block.confidence)
        else:
            confidence = (logits.amax(-1) - logits.logsumexp(-1)).float().cumsum(-1).exp().nan_to_num(0)
        law = None
        if context.do_sample and config.draws_marginals:
            tokens, law = self.drafter.draw(self.view, logits, context)
        else:
            tokens = self.drafter.target_ids(argmax(logits))
        return Draft.chain(tokens, lengths, law=law, confidence=confidence, confidence_kind="prior", evidence=block)

    def block_pass(self, context: Context, slots: slice, ids: Tensor | None = None) -> Block:
        """Some slots of one pass over a block as trained.

        ids: [B, block_size] what the block holds, by default the anchor and masks, of the smallest size trained. The
            context is read in at the first pass of a round; further ones find it there, with what the draft alone
            reads.
        """
        drafter, config = self.drafter, self.drafter.config
        if ids is None:
            size = next((size for size in config.short_blocks or () if size >= slots.stop), config.block_size)
            ids = torch.full((len(context.lengths), size), config.mask_token_id, device=drafter.device)
            ids[:, 0] = context.anchor
        new, lasting = self._take_context()
        start = torch.tensor(context.position, device=drafter.device)
        out = drafter(
            inputs_embeds=drafter.embed_blocks(ids, self.view),
            position_ids=start[:, None] + torch.arange(ids.shape[1], device=drafter.device),
            cache=self.cache,
            slots=slots if drafter.length_head is None else slice(None),
            head=False,
            **new,
        )
        if self.memory is not None and any(lasting):
            self.memory.observe(out.context, new["feature_positions"], lasting)
        hidden, share = out.last_hidden_state, None
        if drafter.length_head is not None:
            hidden, share = hidden[:, slots], drafter.length_head.share(drafter, self.view, hidden)
        logits = self._logits(hidden, context.lengths)
        return Block(logits, drafter.draft_ids, hidden, context.anchor.to(drafter.device), self.memory, share=share)

    def _logits(self, hidden: Tensor, lengths: list[int]) -> Tensor:
        """[B, S, H] -> [B, S, K], by the head where a row drafts, zeros beyond; editors read every slot."""
        drafts = torch.arange(hidden.shape[1]) < torch.tensor(lengths)[:, None]
        if self.drafter.config.edit_passes or bool(drafts.all()):
            return self.drafter.logits(self.view, hidden)
        row, slot = (index.to(hidden.device) for index in drafts.nonzero(as_tuple=True))
        some = self.drafter.logits(self.view, hidden[row, slot])
        logits = some.new_zeros(*drafts.shape, some.shape[-1])
        logits[row, slot] = some
        return logits

    def _take_context(self) -> tuple[dict, list[int]]:
        """What the next pass reads in (arguments of `draft_pass`), and how much of it lasts in each row: the context
        heard of, behind which stands what this draft alone reads."""
        lasting = [sum(row) for row in zip(*(piece.counts for piece in self.pending))]
        if self.carrying is None:
            new, self.temporary = {**self.temporary, **self._take_pending()}, {}
            return new, lasting
        lasting = lasting or [0] * len(self.heard)
        self.pending.append(self.carrying)
        self.carrying = None
        new = self._take_pending()
        device = new["feature_positions"].device
        column = torch.arange(new["feature_positions"].shape[1], device=device)
        new["carried"] = column >= torch.tensor(lasting, device=device)[:, None]
        return new, lasting

    def _take_pending(self) -> dict:
        """The waiting features as one left-justified piece (arguments of `draft_pass`), which are then known."""
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
