"""How long to draft, and whether drafting pays at all.

Costs are measured once per target, drafter and batch size, rounded, and kept for the life of the process; every
decision after that compares counts, never the clock, so that a seed reproduces an output.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

from transformers import GenerationConfig

from .draft import Draft

_UPSTREAM = GenerationConfig._get_default_generation_params()


@dataclass
class Settings:
    """The assistant settings of one call; None where the caller left transformers' default."""

    length: int | None = None
    schedule: str = "constant"
    confidence_threshold: float | None = None

    @classmethod
    def of(cls, config: GenerationConfig) -> Settings:
        """Read them from a prepared generation config, in which upstream's merged default counts as unset."""

        def given(name):
            value = getattr(config, name, None)
            return None if value == _UPSTREAM[name] else value

        settings = cls(
            length=given("num_assistant_tokens"),
            schedule=config.num_assistant_tokens_schedule or "constant",
            confidence_threshold=given("assistant_confidence_threshold"),
        )
        if settings.length is not None and settings.length < 1:
            raise ValueError(
                f"num_assistant_tokens is {settings.length}; it must be at least 1. To generate without drafting, leave "
                "assistant_model out"
            )
        if settings.schedule not in ("constant", "heuristic", "heuristic_transient"):
            raise ValueError(
                f"num_assistant_tokens_schedule {settings.schedule!r} is not known; use 'constant' or 'heuristic'"
            )
        return settings


@dataclass
class Costs:
    """Seconds of one plain target pass, one target pass over a full draft, and one draft of full length."""

    plain: float | None = None
    scored: float | None = None
    draft: float | None = None
    width: int = 0

    @property
    def known(self) -> bool:
        return None not in (self.plain, self.scored, self.draft)


def _rounded(seconds: float) -> float:
    """To the nearest eighth of an octave: what two measurements of the same thing usually agree on."""
    return 2.0 ** (round(8 * math.log2(max(seconds, 1e-9))) / 8)


_measured: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def costs_of(target, drafter, batch: int) -> Costs:
    """The record of what this pair costs at this batch size; filled in by the first call that needs it."""
    per_drafter = _measured.setdefault(target, weakref.WeakKeyDictionary())
    return per_drafter.setdefault(drafter, {}).setdefault(1 << (batch - 1).bit_length(), Costs())


class FixedLength:
    """Always drafts: the same length, or transformers' heuristic (+2 after full acceptance, -1 otherwise) per row."""

    def __init__(self, length: int, heuristic: bool = False, batch: int = 1):
        self.heuristic = heuristic
        self.lengths = [length] * batch

    def before(self, rows: list[int]) -> list[int]:
        """Length for each of the request's rows `rows`."""
        return [self.lengths[row] for row in rows]

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        """Hear the offered depth and the committed tokens of each row."""
        if not self.heuristic:
            return
        for row, depth, tokens in zip(rows, offered, committed):
            if depth:
                self.lengths[row] = self.lengths[row] + 2 if len(tokens) > depth else max(1, self.lengths[row] - 1)

    # A policy that always drafts needs neither costs nor rehearsals.
    wants_plain = False
    rehearses = False


class PaysOff:
    """Switches drafting off while it does not pay, and tries again.

    Tokens per pass are averaged over recent rounds. When they fall short of what a drafted round costs in plain passes,
    drafting stops. While it is off, drafts are rehearsed now and then: made, not verified, and compared with the tokens
    that then come. A rehearsal costs a draft and no target work, so rehearsals are spaced to cost little, and good ones
    switch drafting on again.
    """

    warm_up = 3  # drafted rounds before the first judgement
    memory = 0.8  # weight of the past in the moving averages
    margin = 1.02  # gain that keeps drafting on
    return_margin = 1.15  # gain that switches it on again
    spend = 0.02  # share of plain time that rehearsals may take
    first_gap = 8  # tokens before the first rehearsal; doubles while rehearsals fail

    def __init__(self, inner: FixedLength, costs: Costs):
        self.inner, self.costs = inner, costs
        self.on = True
        self.rounds = 0
        self.average = 0.0
        self.gap = self.first_gap
        self.waited = 0
        self.wants_plain = False
        self._predicted: list[list[int]] | None = None
        self._came: list[list[int]] = []
        self._rows: list[int] = []

    @property
    def rehearses(self) -> bool:
        """Whether the loop should make a draft now and show it to `rehearse` instead of verifying it."""
        return not self.on and self._predicted is None and self.waited >= self.gap

    def before(self, rows: list[int]) -> list[int]:
        lengths = self.inner.before(rows)
        return lengths if self.on and not self.wants_plain else [0] * len(lengths)

    def lengths_to_rehearse(self, rows: list[int]) -> list[int]:
        return self.inner.before(rows)

    def rehearse(self, rows: list[int], draft: Draft, tokens: list[list[int]]) -> None:
        """Remember each row's likeliest drafted path (the first child at every level)."""
        self._rows = list(rows)
        self._predicted = []
        for b in range(len(rows)):
            path, node = [], -1
            for j in range(draft.tokens.shape[1]):
                if bool(draft.valid[b, j]) and int(draft.parents[b, j]) == node:
                    path.append(tokens[b][j])
                    node = j
            self._predicted.append(path)
        self._came = [[] for _ in rows]

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        self.inner.observe(rows, offered, committed)
        progressed = [len(tokens) for tokens in committed if tokens]
        if not progressed:
            return
        if any(offered):
            self._drafted_round(offered, committed)
        else:
            self.waited += max(progressed)
            self._check_rehearsal(rows, committed)

    def _drafted_round(self, offered: list[int], committed: list[list[int]]) -> None:
        gains = [len(tokens) for depth, tokens in zip(offered, committed) if tokens]
        mean = sum(gains) / len(gains)
        self.average = mean if self.rounds == 0 else self.memory * self.average + (1 - self.memory) * mean
        self.rounds += 1
        full = 1 + max(offered)
        # A drafter that is mostly right surely pays, unless it costs as much as the target; else find out what a
        # plain pass costs.
        doubtful = self.average < 0.7 * full or (self.costs.draft or 0) > 0.3 * (self.costs.scored or math.inf)
        self.wants_plain = doubtful and self.rounds >= self.warm_up and self.costs.plain is None
        if self.costs.known and self.rounds >= self.warm_up and self._gain(self.average) < self.margin:
            self.on, self.waited, self._predicted = False, 0, None

    def _gain(self, tokens_per_pass: float) -> float:
        costs = self.costs
        return tokens_per_pass * costs.plain / (costs.scored + costs.draft)

    def _check_rehearsal(self, rows: list[int], committed: list[list[int]]) -> None:
        if self._predicted is None:
            return
        for row, tokens in zip(rows, committed):
            if row in self._rows:
                self._came[self._rows.index(row)] += tokens
        if max(len(came) for came in self._came) < max(map(len, self._predicted), default=0):
            return
        hits = []
        for predicted, came in zip(self._predicted, self._came):
            right = 0
            while right < min(len(predicted), len(came)) and predicted[right] == came[right]:
                right += 1
            hits.append(1 + right)
        self._predicted, self.waited = None, 0
        if self._gain(sum(hits) / len(hits)) >= self.return_margin:
            self.on, self.rounds, self.gap = True, 0, self.first_gap
            return
        floor = self.costs.draft / (self.spend * self.costs.plain)
        self.gap = int(min(max(2 * self.gap, floor), max(64, floor)))

    def calibrated(self, plain: float | None = None, scored: float | None = None, draft: float | None = None) -> None:
        """Hear measured seconds; only the first measurement of each kind counts, so that decisions stay reproducible."""
        for name, seconds in (("plain", plain), ("scored", scored), ("draft", draft)):
            if seconds is not None and getattr(self.costs, name) is None:
                setattr(self.costs, name, _rounded(seconds))
        if self.costs.plain is not None:
            self.wants_plain = False
            if self.costs.known and self.rounds >= self.warm_up and self._gain(self.average) < self.margin:
                self.on, self.waited, self._predicted = False, 0, None
