"""DiffuSpec's causal path search (2510.02358): marginals made coherent by counts of the text so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..draft import Block
from ..parts import Scored
from .base import Corrector, Memory, Scores, State

if TYPE_CHECKING:
    from ..drafters.base import TargetView
    from ..heads import HeadedDrafter
    from ..training.records import Unrolled

# Probability of the next token given two, in tokens' worth of the shorter context's: additive smoothing whose prior
# backs off from two tokens to one, to none, to all tokens alike.
PRIOR = 1.0


class Trigrams:
    """Counts of one row's text: the probability of a token after two."""

    def __init__(self):
        self.last: tuple[int, ...] = ()  # the text's last two tokens
        self._after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._seen: Counter[tuple[int, ...]] = Counter()

    def add(self, tokens: list[int]) -> None:
        """The text goes on with these."""
        for token in tokens:
            for start in range(len(self.last) + 1):
                self._after[self.last[start:]][token] += 1
                self._seen[self.last[start:]] += 1
            self.last = (*self.last, token)[-2:]

    def probs(self, before: tuple[int, ...], tokens: list[int], vocab_size: int) -> list[float]:
        """Of each of `tokens`, after at most two tokens `before`."""
        found = [1 / vocab_size] * len(tokens)
        for start in range(len(before), -1, -1):
            seen = self._seen.get(before[start:])
            if seen is None:  # nor was anything longer seen
                break
            after = self._after[before[start:]]
            found = [(after.get(token, 0) + PRIOR * p) / (seen + PRIOR) for token, p in zip(tokens, found)]
        return found


class Text(Memory):
    """The trigrams of each row's prompt and answer."""

    def __init__(self, batch: int):
        self.rows = [Trigrams() for _ in range(batch)]

    def hear(self, tokens: list[list[int]]) -> None:
        for row, new in zip(self.rows, tokens):
            row.add(new)

    def observe(self, context: Tensor, positions: Tensor, counts: list[int]) -> None:
        """Nothing: hidden states are not read."""

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


@dataclass
class PathState(State):
    """carry: [R] the token before the last one, -1 for none.

    texts: of the block's rows. columns: per row and slot, the candidates on the host. ids, log_probs: [B, S, M] their
    target ids and marginal log-probabilities, -inf for what is not a candidate.
    """

    texts: list[Trigrams] | None = None
    columns: list[list[list[int]]] | None = None
    ids: Tensor | None = None
    log_probs: Tensor | None = None


class PathSearch(Corrector):
    """Scores the likeliest tokens of each slot by `lambda_` log p(slot) + (1 - `lambda_`) log p(trigram).

    A slot's candidates are the smallest set of its top tokens that holds `tau` of its probability, at most
    `max_candidates`, and the target's end tokens. After the first slot that an end token leads, nothing follows.

    The trigrams are those of the row's own prompt and answer, backed off by additive smoothing; the paper's come from a
    corpus. Trained correctors do the same job better: this is for drafters that have none. Drafts of `walkers.beam`,
    trees too. Under sampling all of them are point drafts (a search result has no law), whatever `draft_sampling` says.

    lambda_: weight of the marginals, 0 to 1. beam: paths kept; 1 takes the best token of each slot in turn.
    """

    name = "path"
    additive = True

    def __init__(self, config, tau: float = 0.8, max_candidates: int = 15, beam: int = 3, lambda_: float = 0.5):
        super().__init__(config)
        if not 0 < tau <= 1:
            raise ValueError(f"corrector path: tau must be above 0 and at most 1, got {tau}")
        if not 0 <= lambda_ <= 1:
            raise ValueError(f"corrector path: lambda_ must be from 0 to 1, got {lambda_}")
        for option, value in (("max_candidates", max_candidates), ("beam", beam)):
            if value < 1:
                raise ValueError(f"corrector path: {option} must be at least 1, got {value}")
        self.tau, self.max_candidates, self.beam, self.lambda_ = tau, max_candidates, beam, lambda_

    def memory(self, batch: int) -> Text:
        return Text(batch)

    def begin(self, drafter: HeadedDrafter, view: TargetView, block: Block) -> PathState:
        log_probs = block.logits.log_softmax(-1, dtype=torch.float32)
        best, index = log_probs.topk(min(self.max_candidates, log_probs.shape[-1]))
        before = best.exp().cumsum(-1) - best.exp()
        candidates = before < self.tau - 1e-6  # sums that are meant to be tau round to either side of it
        # The end tokens stand behind the others, in columns of their own.
        ends = torch.tensor(view.end_ids, dtype=torch.long, device=best.device)
        vocabulary = drafter.target_ids(torch.arange(log_probs.shape[-1], device=best.device))
        rows, ids = torch.isin(vocabulary, ends).nonzero()[:, 0], drafter.target_ids(index)
        is_end = torch.isin(ids, ends)
        ended = is_end[:, :, :1].long().cumsum(1) - is_end[:, :, :1].long() > 0
        known = torch.cat([best.masked_fill(~candidates | is_end, -torch.inf), log_probs[:, :, rows]], 2)
        known = known.masked_fill(ended, -torch.inf)
        ids = torch.cat([ids, vocabulary[rows].expand(*ids.shape[:2], -1)], 2)
        texts = [Trigrams()] * len(ids) if block.memory is None else block.memory.rows  # training has no memory
        last = [text.last[-2] if len(text.last) > 1 else -1 for text in texts]
        walkers, carry = torch.arange(len(last), device=ids.device), torch.tensor(last, device=ids.device)
        return PathState(drafter, view, block, walkers, carry, texts, ids.tolist(), ids, known)

    def step(self, state: PathState, slot: int, previous: Tensor) -> tuple[Scores, PathState]:
        text = [
            state.texts[row].probs((first, second)[first < 0 :], state.columns[row][slot], state.view.vocab_size)
            for row, first, second in torch.stack([state.rows, state.carry, previous], 1).tolist()
        ]
        marginal = state.log_probs[state.rows, slot]
        text = torch.tensor(text, device=marginal.device).log()
        scores = torch.where(marginal > -torch.inf, self.lambda_ * marginal + (1 - self.lambda_) * text, marginal)
        return Scores(scores, state.ids[state.rows, slot]), replace(state, carry=previous)

    def teach(self, drafter: HeadedDrafter, view: TargetView, unrolled: Unrolled, base: Tensor) -> Scored:
        """The marginals: there is nothing to train."""
        return Scored(base)
