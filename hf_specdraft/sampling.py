"""Logits -> scores and probabilities exactly as `generate` warps them, each node with its own prefix.

Processors fall into three kinds. Prefix-free ones (temperature, top-k, ...) look at scores alone: one call serves all
nodes. Row-wise ones (penalties, n-gram bans, lengths, ...) look at their row's prefix: they are called once per row and
depth along the accepted path, so what they see, and in which order, is what plain generate would show them. Everything
else, a user's own class above all, may also know which row it serves: it gets a full-size batch. Processors that keep
state from call to call are exact for one row, because of that order, and refused for several.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from .verification import argmax, sample

PREFIX_FREE = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.TopHLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor,
)
ROW_WISE = (
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.WatermarkLogitsProcessor,
)
CALL_ORDER = (lp.UnbatchedClassifierFreeGuidanceLogitsProcessor, lp.SynthIDTextWatermarkLogitsProcessor)

# Rows of scores held in float32 at a time, in bytes: a bound on memory, never on what can be computed.
_CHUNK = 256 * 2**20


def refuse_call_order(processors: list, batch: int) -> None:
    """Raise ValueError for processors whose state depends on the order of calls, when rows could break that order."""
    for processor in processors:
        if isinstance(processor, CALL_ORDER) and batch > 1:
            raise ValueError(
                f"{type(processor).__name__} keeps state from call to call and rows of a speculative batch advance "
                "unevenly; generate one row at a time, or without assistant_model"
            )


class Noise:
    """Uniforms in [0, 1), one for each new token of each row, from torch's global seed.

    Verifying a point draft draws the target's own token at every position. With noise that belongs to the position, the
    text depends on the seed alone: not on what was drafted, how deep, or when.
    """

    _CHUNK = 64

    def __init__(self, batch: int):
        self._generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        self._table = torch.empty(batch, 0, dtype=torch.float64)

    def at(self, rows: list[int], positions: Tensor) -> Tensor:
        """[R, C] noise of the request's rows `rows` at their new tokens `positions` [R, C], 0 the first; on the CPU."""
        while self._table.shape[1] <= int(positions.max()):
            more = torch.rand(len(self._table), self._CHUNK, dtype=torch.float64, generator=self._generator)
            self._table = torch.cat([self._table, more], dim=1)
        return self._table[torch.tensor(rows)[:, None], positions]


class Scorer:
    """The request's logits processors, for one call of generate.

    processors: the list `generate` prepared, in its order.
    batch: rows of the request (processors may index them).
    """

    def __init__(self, processors: list, batch: int, do_sample: bool):
        refuse_call_order(processors, batch)
        self.processors = list(processors)
        self.batch = batch
        self.do_sample = do_sample
        self.noise = Noise(batch) if do_sample else None
        self.prefix_free = all(type(p) in PREFIX_FREE for p in self.processors)
        self._warpers = [p for p in self.processors if type(p) in PREFIX_FREE]
        # The temperature when nothing else is asked for (1 when nothing at all), None otherwise.
        self.temperature: float | None = None
        if not self.processors:
            self.temperature = 1.0
        elif len(self.processors) == 1 and type(self.processors[0]) is lp.TemperatureLogitsWarper:
            self.temperature = self.processors[0].temperature

    def warp(self, scores: Tensor) -> Tensor:
        """[..., V] scores through the prefix-free processors: all of them when `prefix_free`, else the best a drafter
        can do before it knows the prefix."""
        flat = scores.reshape(-1, scores.shape[-1]).float()
        for warper in self._warpers:
            flat = warper(None, flat)
        return flat.view(scores.shape)

    def distribution(self, scores: Tensor) -> Tensor:
        """[R, V] processed scores -> probabilities; one-hot on the argmax when the request is greedy."""
        if self.do_sample:
            return scores.softmax(-1)
        return torch.zeros_like(scores).scatter_(-1, argmax(scores)[..., None], 1.0)

    def choose(self, logits: Tensor, uniforms: Tensor | None) -> Tensor:
        """[B, R, V] logits of prefix-free rows -> [B, R] the target's token in every row (rules B and C)."""
        if not self._warpers and not self.do_sample:
            return argmax(logits)
        batch, rows, vocab = logits.shape
        step = max(1, _CHUNK // (4 * vocab * batch))
        chosen = []
        for i in range(0, rows, step):
            scores = self.warp(logits[:, i : i + step])
            if self.do_sample:
                chosen.append(sample(scores.softmax(-1), uniforms[:, i : i + step]))
            else:
                chosen.append(argmax(scores))
        return torch.cat(chosen, dim=1)

    def process(self, scores: Tensor, rows: list[int], prefixes: list[Tensor]) -> Tensor:
        """[R, V] float32 scores of rows `rows` of the request through every processor, each with its own prefix [l].

        The prefix is the row as plain generate holds it: its padding, its prompt, its tokens so far.
        """
        out = torch.empty_like(scores)
        for group in _same_length(prefixes):
            ids = torch.stack([prefixes[i] for i in group])
            part = scores[group]
            for processor in self.processors:
                part = self._call(processor, ids, part, [rows[i] for i in group])
            out[group] = part
        return out

    def _call(self, processor: Callable, ids: Tensor, scores: Tensor, rows: list[int]) -> Tensor:
        if _is_row_wise(processor) or rows == list(range(self.batch)):
            return processor(ids, scores)
        if type(processor) is lp.RepetitionPenaltyLogitsProcessor:
            ignored = processor.prompt_ignore_length[rows]
            return lp.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored)(ids, scores)
        if type(processor) is lp.PrefixConstrainedLogitsProcessor:
            # It numbers prompts, not rows: num_return_sequences rows share a number.
            allowed, share = processor._prefix_allowed_tokens_fn, processor._num_beams
            return torch.cat(
                [
                    lp.PrefixConstrainedLogitsProcessor(lambda _, prefix, row=row: allowed(row // share, prefix), 1)(
                        ids[i : i + 1], scores[i : i + 1]
                    )
                    for i, row in enumerate(rows)
                ]
            )
        # The processor may look up its row by number: show it each row in its place, in a batch of the usual size whose
        # other rows repeat the first of these.
        place = torch.zeros(self.batch, dtype=torch.long, device=ids.device)
        place[rows] = torch.arange(len(rows), device=ids.device)
        return processor(ids[place], scores[place])[rows]


def _is_row_wise(processor: Callable) -> bool:
    if type(processor) is lp.RepetitionPenaltyLogitsProcessor:
        return not isinstance(processor.prompt_ignore_length, Tensor)
    return type(processor) in PREFIX_FREE or type(processor) in ROW_WISE


def _same_length(prefixes: list[Tensor]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, prefix in enumerate(prefixes):
        groups.setdefault(len(prefix), []).append(i)
    return list(groups.values())
