"""Laws of a target along continuations that it samples, and a drafter's along the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import record_past, refuse_uncuttable
from ..drafters.base import Drafter, TargetView
from ..training.features import LiveFeatures
from ..training.records import TrainingBatch
from . import floors

# Rows of context that a drafter reads at a time.
_ROWS = 8


@dataclass
class Laws:
    """The target's laws after M prefixes: the best K tokens' ids and renormalised probs [M, K], dropped mass [M]."""

    ids: Tensor
    probs: Tensor
    residual: Tensor

    @classmethod
    def of(cls, logits: Tensor, top_k: int) -> Laws:
        """Of [M, V] logits."""
        best = logits.softmax(-1, dtype=torch.float64).topk(min(top_k, logits.shape[-1]))
        kept = best.values.sum(-1, keepdim=True)
        return cls(best.indices, best.values / kept, 1 - kept[:, 0])

    def dense(self) -> Tensor:
        """[M, U] over the union of their tokens."""
        union, places = self.ids.unique(return_inverse=True)
        return self.probs.new_zeros(len(self.ids), len(union)).scatter(1, places, self.probs)

    def distance(self, q: Tensor) -> Tensor:
        """[M] TV to as many dense laws [M, V]."""
        return floors.total_variation(self.probs, q.gather(1, self.ids).to(self.probs))


@dataclass
class Rollouts:
    """M continuations of one context by the target at temperature 1, and one more, the realised one, in the last row.

    tokens: [M + 1, S]. probs: [M + 1, S] their own probabilities. laws: per slot, those along the rows. forced: per
    slot from 1 on, those after each row's tokens but the realised one in the place before the slot; log_weights
    [M + 1] that token's log probability there. alive: [M + 1, S] bool, no end token before the slot.
    """

    tokens: Tensor
    probs: Tensor
    laws: list[Laws]
    forced: list[Laws]
    log_weights: list[Tensor]
    alive: Tensor


@torch.no_grad()
def roll_out(
    target: PreTrainedModel, context: Tensor, count: int, slots: int, top_k: int, ends: Iterable[int] = ()
) -> Rollouts:
    """Sample `count` + 1 continuations of a context [L] of tokens; its keys and values are computed once.

    Raises ValueError for a target whose cache cannot be cut back.
    """
    out = target(input_ids=context[None].to(target.device), use_cache=True)
    cache = out.cache
    refuse_uncuttable(cache)
    record_past(cache, True)
    cache.batch_repeat_interleave(count + 1)
    logits = out.logits[:, -1].expand(count + 1, -1)
    tokens, probs, laws, forced, log_weights = [], [], [], [], []
    for slot in range(slots):
        laws.append(Laws.of(logits, top_k))
        law = logits.softmax(-1, dtype=torch.float32)
        drawn = law.multinomial(1)
        tokens.append(drawn)
        probs.append(law.gather(1, drawn))
        if slot + 1 < slots:
            realised = drawn[-1:].expand_as(drawn)
            log_weights.append(logits.log_softmax(-1, dtype=torch.float64).gather(1, realised)[:, 0])
            after = target(input_ids=realised, cache=cache, use_cache=True).logits[:, -1]
            forced.append(Laws.of(after, top_k))
            cache.crop(-1)
            logits = target(input_ids=drawn, cache=cache, use_cache=True).logits[:, -1]
    drawn = torch.cat(tokens, 1)
    ended = torch.isin(drawn, torch.tensor(list(ends), device=drawn.device, dtype=drawn.dtype)).long().cumsum(1)
    alive = torch.nn.functional.pad(ended[:, :-1], (1, 0)) == 0
    return Rollouts(drawn, torch.cat(probs, 1), laws, forced, log_weights, alive)


class Proposals:
    """A drafter's laws along given continuations of a context, teacher-forced as in training.

    order: how many of the tokens before a slot the law there depends on: 0, 1, or None for more; found by changing
    them. Raises ValueError for drafters that cannot be unrolled.
    """

    def __init__(self, drafter: Drafter, target: PreTrainedModel, context: Tensor, continuation: Tensor):
        """continuation: [S] tokens to find the order at."""
        self.drafter, self.view = drafter, TargetView(target)
        drafter.check(self.view)
        self.features = LiveFeatures(target, drafter.feature_layers, law=False)
        self.order: int | None = None
        slots = self(context, continuation[None]).shape[1]
        others = (continuation + 1) % self.view.vocab_size
        before = torch.cat((others[: max(slots - 2, 0)], continuation[max(slots - 2, 0) :]))
        law, unlike, like = self(context, torch.stack((continuation, others, before)))[:, slots - 1]
        # Rows of one pass may differ by rounding.
        self.order = next((m for m, x in enumerate((unlike, like)) if (law - x).abs().max() < 1e-5), None)

    @torch.no_grad()
    def __call__(self, context: Tensor, tokens: Tensor) -> Tensor:
        """[N, S, V] laws along N continuations `tokens` [N, S]; S may come out less, as many as the drafter drafts."""
        features = self.features(_batch(context[None])).features
        if self.order == 0:
            return self._laws(context, features, tokens[:1]).expand(len(tokens), -1, -1)
        return torch.cat([self._laws(context, features, part) for part in tokens.split(_ROWS)])

    def _laws(self, context: Tensor, features: Tensor | None, tokens: Tensor) -> Tensor:
        (rows, slots), known = tokens.shape, len(context)
        ids = torch.cat((context.expand(rows, -1), tokens.to(context.device)), dim=1)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, known - 1 : known + 1] = True  # makes the context's last token the one anchor
        if features is not None:
            features = torch.nn.functional.pad(features, (0, 0, 0, slots)).expand(rows, -1, -1)
        options = {"anchors": None, "slots": slots, "steps": slots}
        accepted = inspect.signature(self.drafter.unroll).parameters
        batch = _batch(ids, loss_mask=mask, features=features).to(self.drafter.device)
        options = {key: value for key, value in options.items() if key in accepted}
        unrolled = self.drafter.unroll(self.view, batch, **options)
        q = self.drafter.score(self.view, unrolled).logits.softmax(-1, dtype=torch.float32)[:, :slots]
        if self.drafter.draft_token_ids is None:
            return torch.nn.functional.pad(q, (0, self.view.vocab_size - q.shape[-1]))
        return q.new_zeros(*q.shape[:-1], self.view.vocab_size).index_copy_(-1, self.drafter.draft_token_ids, q)


def _batch(ids: Tensor, **fields: Any) -> TrainingBatch:
    """Rows that are one document each."""
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return TrainingBatch(ids, torch.ones_like(ids), places, **{"loss_mask": torch.ones_like(ids).bool(), **fields})
