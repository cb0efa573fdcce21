"""One call of an EAGLE-3 drafter: what it has heard of, and the chains and trees it makes of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...draft import Commit, Context, Draft, Law, Partial
from ...verification import argmax
from ..base import TargetView
from ..block.context_cache import ContextCache, writable
from ..block.session_block import BlockSession

if TYPE_CHECKING:
    from .modeling_eagle3 import Eagle3Drafter


class StepCache(ContextCache):
    """The rows with features stay; drafted rows stand behind the longest of them until the next ones come."""

    def reserve(self, columns: int) -> None:
        """Room for so many drafted rows."""
        missing = self.length + columns - self.positions.shape[1]
        if missing > 0:
            room = max(missing, self.positions.shape[1])
            self.positions = F.pad(self.positions, (0, room), value=-1)
            self.keys, self.values = ([F.pad(part, (0, 0, 0, room)) for part in s] for s in (self.keys, self.values))

    def commit(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """`write`, then everything there is."""
        self.write(layer, keys, values)
        return self.read(layer)

    def draft(self, first: int, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put drafted rows behind the `first` that were drafted before them; everything up to them."""
        start, stop = self.length + first, self.length + first + keys.shape[2]
        for store, new in ((self.keys, keys), (self.values, values)):
            store[layer] = writable(store[layer])
            store[layer][:, :, start:stop] = new
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]


class Eagle3Session(BlockSession):
    """Row t of the cache is made of the target's state at t and token t + 1, so the newest one ends in the anchor.

    The pass that adds what was committed since the last draft is the first step of the next one.
    """

    def __init__(self, drafter: Eagle3Drafter, view: TargetView, batch: int):
        super().__init__(drafter, view, batch)
        self.cache = StepCache(batch)
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.window = drafter.config.token_window
        # Of each row's newest row with features: [B, 1, H] what the head reads, and what the next step does.
        self.newest: tuple[Tensor, Tensor] | None = None

    def observe(self, commit: Commit) -> None:
        for text, new in zip(self.texts, commit.tokens):
            text += new
        super().observe(commit)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.texts = [self.texts[row] for row in rows]
        if self.newest is not None:
            self.newest = self.newest[0][rows], self.newest[1][rows]

    @torch.no_grad()
    def propose(self, context: Context) -> Draft:
        depth = max(context.lengths, default=0)
        if depth > 0:
            self._catch_up()
        if depth < 1 or self.newest is None:
            return Draft.empty(len(context.lengths), self.drafter.device)
        if context.tree and self.drafter.config.tree_nodes > 0:
            return self._tree(context, depth)
        return self._chain(context, depth)

    def _catch_up(self) -> None:
        """Read what was committed since the last draft."""
        piece = self._take_pending()
        if not piece:
            return
        drafter, cache = self.drafter, self.cache
        positions, counts = piece["feature_positions"], piece["counts"]
        width = positions.shape[1]
        # Features end before the anchor, so each one's next token is found from the end. A prompt that came as
        # embeddings has none: its rows are worse for it, never wrong.
        ids = torch.tensor(
            [[*self._windows(text, n), *[[0] * self.window] * (width - n)] for text, n in zip(self.texts, counts)],
            device=drafter.device,
        )
        cache.extend(positions, counts)
        known = cache.positions[:, : cache.length]
        last = (known >= 0)[:, None, None] if min(cache.counts) < cache.length else None
        earlier = None
        if len(drafter.layers) > 1:
            earlier = ((known[:, None] >= 0) & (known[:, None] <= positions.clamp(min=0)[:, :, None]))[:, None]
        embeds = drafter.embed(ids, self.view)
        out = drafter(
            embeds,
            drafter.rotary_emb(embeds, positions.clamp(min=0)),
            features=piece["features"],
            past=cache.commit,
            attention_mask=[*[earlier] * (len(drafter.layers) - 1), last],
            rows=torch.tensor(counts, device=drafter.device).clamp(min=1) - 1,
        )
        newest = out.last_hidden_state, out.state
        if self.newest is not None and min(counts) == 0:
            fresh = torch.tensor(counts, device=drafter.device)[:, None, None] > 0
            newest = tuple(new.where(fresh, old) for new, old in zip(newest, self.newest))
        self.newest = newest

    def _windows(self, text: list[int], count: int) -> list[list[int]]:
        """Of each of the last `count` tokens of a text, it and those before it; the first stands for what is before."""
        needed = count + self.window - 1
        tail = text[max(0, len(text) - needed) :]
        tail = (text[:1] or [0]) * (needed - len(tail)) + tail
        return [tail[i : i + self.window][::-1] for i in range(count)]

    def _recent(self) -> Tensor:
        """[B, w] the last tokens of each row, the anchor first."""
        return torch.tensor([self._windows(text, 1)[0] for text in self.texts], device=self.drafter.device)

    def _rope(self, context: Context, steps: int) -> tuple[Tensor, Tensor]:
        """Angles [B, steps, R] of the drafted rows: the first one's position is the anchor's."""
        start = torch.tensor(context.position)[:, None] + torch.arange(steps)
        return self.drafter.rotary_emb(self.newest[0], start.to(self.drafter.device))

    def _seen(self) -> Tensor | None:
        """[B, L] which keys with features each row has, None when all rows have them all."""
        cache = self.cache
        return cache.positions[:, : cache.length] >= 0 if min(cache.counts) < cache.length else None

    def _chain(self, context: Context, depth: int) -> Draft:
        drafter, cache, view = self.drafter, self.cache, self.view
        hidden, state = self.newest
        drawn = context.do_sample and drafter.config.draft_sampling
        cos, sin = self._rope(context, depth)
        cache.reserve(depth)
        seen = self._seen()
        if seen is not None:
            seen = F.pad(seen, (0, depth), value=True)[:, None, None]
        lengths, tokens, laws, sure = context.lengths, [], [], []
        recent = self._recent()
        for step in range(depth):
            logits = drafter.logits(view, hidden)
            if drawn:
                token, law = drafter.draw(view, logits, context)
                laws.append(law)
            else:
                token = drafter.target_ids(argmax(logits))
            tokens.append(token)
            sure.append(_top(logits))
            if step + 1 < max(lengths):
                # Stop AFTER an unsure token: it stays in the draft, so nothing is chosen by what was drawn.
                taken, read = law.probs.log() if drawn else logits, hidden[:, 0]
                going = context.more(Partial(step + 1, token[:, 0], taken[:, 0], read, read, ids=drafter.draft_ids))
                lengths = [n if goes else min(n, step + 1) for n, goes in zip(lengths, going)]
            if step + 1 >= max(lengths):
                break
            recent = torch.cat((token, recent[:, :-1]), dim=1)
            out = drafter(
                drafter.embed(recent[:, None], view),
                (cos[:, step : step + 1], sin[:, step : step + 1]),
                state=state,
                past=partial(cache.draft, step),
                attention_mask=[None if seen is None else seen[..., : cache.length + step + 1]] * len(drafter.layers),
            )
            hidden, state = out.last_hidden_state, out.state
        lengths = [min(n, len(tokens)) for n in lengths]
        tokens, law = torch.cat(tokens, dim=1), None
        if drawn:
            law = Law(torch.cat([law.probs for law in laws], 1), _joined([law.ids for law in laws]), laws[0].rows)
        confidence = torch.cat(sure, dim=1).cumsum(-1).exp().nan_to_num(0)
        return Draft.chain(tokens, lengths, law=law, confidence=confidence, confidence_kind="pre")

    def _tree(self, context: Context, depth: int) -> Draft:
        """EAGLE-2 (2406.16858): each level's likeliest paths are expanded; of all nodes the likeliest are kept."""
        drafter, cache, view = self.drafter, self.cache, self.view
        hidden, state = self.newest
        batch, device = len(state), state.device
        cos, sin = self._rope(context, depth)
        log_probs = _log_probs(drafter.logits(view, hidden))
        width = min(drafter.config.tree_width, log_probs.shape[-1])
        cache.reserve(depth * width)
        seen = self._seen()
        seen = torch.ones(batch, cache.length, dtype=torch.bool, device=device) if seen is None else seen
        seen, own = seen[:, None].expand(-1, width, -1), torch.eye(width, dtype=torch.bool, device=device)
        own = own.expand(batch, width, width)
        score, picks = (part[:, 0] for part in log_probs.topk(width))  # [B, k]
        state, token = state.expand(-1, width, -1), drafter.target_ids(picks)
        recent = torch.cat((token[..., None], self._recent()[:, None, :-1].expand(-1, width, -1)), dim=-1)
        # All nodes so far [B, P]: their scores, tokens and parents, level by level; and the frontier's numbers.
        scores, tokens, parents = [score], [token], [torch.full_like(token, -1)]
        levels, frontier = [width], torch.arange(width, device=device).expand(batch, width)
        for level in range(1, depth):
            seen = torch.cat((seen, own), dim=-1)
            out = drafter(
                drafter.embed(recent, view),
                (cos[:, level - 1 : level], sin[:, level - 1 : level]),
                state=state,
                past=partial(cache.draft, width * (level - 1)),
                attention_mask=[seen[:, None]] * len(drafter.layers),
            )
            gain, picks = _log_probs(drafter.logits(view, out.last_hidden_state)).topk(width)  # [B, k, k]
            offered = (score[:, :, None] + gain).flatten(1)
            scores.append(offered)
            tokens.append(drafter.target_ids(picks).flatten(1))
            parents.append(frontier[:, :, None].expand_as(picks).flatten(1))
            score, best = offered.topk(width)
            token, row = tokens[-1].gather(1, best), best // width
            frontier = best + sum(levels)
            levels.append(width * width)
            recent = torch.cat((token[..., None], recent.take_along_dim(row[:, :, None], 1)[..., :-1]), dim=-1)
            state = out.state.take_along_dim(row[:, :, None], 1)
            seen = seen.take_along_dim(row[:, :, None], 1)
        scores, tokens, parents = (torch.cat(parts, dim=1) for parts in (scores, tokens, parents))
        deep = torch.repeat_interleave(torch.arange(1, len(levels) + 1), torch.tensor(levels))
        denied = deep > torch.tensor(context.lengths)[:, None]
        scores = scores.masked_fill(denied.to(device), -torch.inf)
        # No node is likelier than its parent, and of equals the earlier one wins: none is kept without its parent.
        nodes = min(context.nodes, scores.shape[1])
        kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
        number = torch.full_like(parents, -1).scatter_(1, kept, torch.arange(nodes, device=device).expand_as(kept))
        chosen, parents = scores.gather(1, kept), parents.gather(1, kept)
        parents = number.gather(1, parents.clamp(min=0)).where((parents >= 0) & (chosen > -torch.inf), -1)
        parents, valid = torch.stack((parents, (chosen > -torch.inf).long())).cpu()
        return Draft(tokens.gather(1, kept), parents, valid.bool(), confidence=chosen.exp())


def _top(logits: Tensor) -> Tensor:
    """[..., K] -> [...] log-probability of the greatest, float32."""
    return (logits.amax(-1) - logits.logsumexp(-1)).float()


def _log_probs(logits: Tensor) -> Tensor:
    """Float32 log-probabilities; a network that says NaN gets nothing kept."""
    return logits.log_softmax(-1, dtype=torch.float32).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _joined(ids: list[Tensor | None]) -> Tensor | None:
    return None if ids[0] is None else torch.cat(ids, dim=1)
