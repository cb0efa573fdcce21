"""How deep to draft, and whether drafting pays at all.

Costs are measured once per target, drafter and kind of call, and kept for the life of the process; no decision is made
before they are known, and every decision compares counts, never the clock, so that a seed reproduces an output.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig

from .draft import Draft
from .trees import prune

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
                f"num_assistant_tokens is {settings.length}; it must be at least 1. To generate without drafting, "
                "leave assistant_model out"
            )
        threshold = settings.confidence_threshold
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"assistant_confidence_threshold is {threshold}; it must be between 0 and 1")
        if settings.schedule not in ("constant", "heuristic", "heuristic_transient"):
            raise ValueError(
                f"num_assistant_tokens_schedule {settings.schedule!r} is not known; use 'constant' or 'heuristic'"
            )
        return settings


@dataclass
class Costs:
    """Seconds that a pair of target and drafter takes: the least of a few measurements each.

    passes: seconds of a target pass by number of nodes, 0 for a plain one; empty until measured.
    draft: one draft of full depth, with what the session does when it hears the outcome.
    """

    passes: dict[int, float] = field(default_factory=dict)
    draft: float = 0.0
    _rounds: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return bool(self.passes)

    @property
    def plain(self) -> float:
        return self.passes[0]

    def hear(self, nodes: int, target: float, draft: float) -> bool:
        """Take down a drafted round; whether there are enough of them to `settle`."""
        self._rounds.append((nodes, target, draft))
        return len(self._rounds) >= PaysOff.warm_up

    def settle(self, passes: dict[int, float]) -> None:
        """Fix the costs for good, given the seconds of bare passes, the plain one among them."""
        for nodes, target, _ in self._rounds:
            # A round's first sight of a width may include set-up; no pass is cheaper than a plain one.
            passes[nodes] = max(passes[0], min(target, passes.get(nodes, target)))
        self.draft = min(draft for _, _, draft in self._rounds)
        self.passes = dict(sorted(passes.items()))

    def seconds(self, nodes: float) -> float:
        """Of a pass over `nodes` nodes, between and beyond the measured numbers on straight lines."""
        known = list(self.passes)
        if len(known) == 1:
            return self.plain
        right = next((i for i, n in enumerate(known) if n >= nodes and i), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.passes[high] - self.passes[low]) / (high - low)
        if nodes > high:
            slope = max(slope, (self.passes[high] - self.plain) / high)
        return self.passes[high] + slope * (nodes - high)


# What a node adds to a pass where nothing may be measured, in plain passes.
NOMINAL_NODE = 0.02
_measured: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def costs_of(target, drafter, batch: int, columns: int, depth: int, nodes: int) -> Costs:
    """The record of what this pair costs for `batch` prompts of `columns` tokens (each to the next power of two) and
    drafts of `depth` levels and `nodes` nodes; filled in by the first call that needs it."""
    per_drafter = _measured.setdefault(target, weakref.WeakKeyDictionary())
    kind = ((batch - 1).bit_length(), columns.bit_length(), depth, nodes)
    return per_drafter.setdefault(drafter, {}).setdefault(kind, Costs())


def nominal_costs(target, drafter, depth: int, nodes: int) -> Costs:
    """Costs by the number of weights, in plain passes, for sampling with drafts that are drawn.

    There the sampled text depends on how deep each draft was, so that a measured depth would make one seed give
    different texts in different processes. (Point drafts have no such trouble: see `sampling.Noise`.)
    """
    size = target.num_parameters()
    one = drafter.num_parameters() / size if size else 1.0
    widest = max(nodes, depth)
    return Costs({0: 1.0, widest: 1.0 + NOMINAL_NODE * widest}, one * (depth if drafter.is_sequential else 1))


class FixedLength:
    """Always drafts: the same length, or transformers' heuristic (+2 after full acceptance, -1 otherwise) per row."""

    costs: Costs | None = None
    free_only = False  # whether a drafter that has a free part should leave its network out of this round

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        """The nodes worth verifying: here, all."""
        return draft

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


class PaysOff:
    """Drafts as deep as pays, and hardly ever while nothing does.

    The gain of a depth is how much faster than plain decoding a round of that depth is: expected tokens (1 + the
    chances that 1, 2, ... levels are accepted, averaged over the rows) over seconds (`Costs`). The chance of a level is
    counted over recent rounds; where little was counted it is taken to be that of the level before. While no depth
    gains, every now and then one round is drafted all the same, so seldom that it costs at most `spend` of plain
    decoding; good ones bring drafting back.

    Where the drafter rates its nodes (`Draft.confidence`), only those are verified that earn their place in the pass:
    the likeliest ones, as many as make expected tokens per second greatest (CaDDTree, arXiv 2606.01813). Ratings are
    taken in proportion to how well recent ones came true. A free drafter that rates its nodes needs no switch besides.

    inner: proposes the lengths that are cut here.
    nodes: nodes of a tree, 0 for chains.
    adaptive: whether depths below the full one may be chosen; otherwise it is all or nothing.
    sequential: whether a draft's cost grows with its depth.
    free: whether a draft without any node costs nothing.
    free_part: whether the drafter can go on without its network. Where others stop drafting it drafts without; rounds
        without the network need no switch, and say nothing about what it gains.
    """

    warm_up = 3  # drafted rounds of every call before the first judgement: so many the first call needs to measure
    memory = 0.9  # weight of the past in the counts, per drafted round
    memory_off = 0.5  # the same while drafting is off: the rare rounds that are left speak for all those between them
    prior, prior_weight = 0.5, 0.5  # chance of the first level, and rounds it counts for, before anything is known
    trust_memory = 0.97  # weight of the past in how well ratings came true: long, as every round counts several nodes
    trust_weight = 2.0  # ratings (in tokens) that are believed before any came true
    margin = 1.05  # gain that is worth while: a guess from few rounds, or costs measured on a busy machine, may be off
    spend = 0.05  # share of plain time that drafting may cost while it is off

    def __init__(
        self,
        inner: FixedLength,
        costs: Costs,
        nodes: int = 0,
        adaptive: bool = False,
        sequential: bool = False,
        free: bool = False,
        free_part: bool = False,
    ):
        self.inner, self.costs, self.nodes = inner, costs, nodes
        # A depth that suits the network would cut what costs nothing.
        self.adaptive, self.sequential = adaptive and not free_part, sequential
        self.free, self.free_part = free, free_part
        self.full = max(inner.lengths)
        self.depth: int | None = None  # None: whatever `inner` says
        self.gain, self.gap, self.waited, self.rounds = float("inf"), 0.0, 0, 0
        self._asked = self._spared = False
        self._rated, self._mass, self._hits, self._claimed, self._used = False, 0.0, 0.0, 0.0, float(nodes or self.full)
        self._reached: list[float] = []
        self._passed: list[float] = []

    def cut(self, draft: Draft, going: list[bool]) -> Draft:
        """Only the nodes worth verifying. `going`: rows that are not finished.

        Cutting by a rating that looked at the token makes drawn rows point rows, so such a draft is left as it is.
        """
        own = draft.confidence_kind == "own"
        self._spared = draft.free
        # A free drafter needs no warm-up: its ratings say from the first round on what is worth verifying.
        if (
            not (self.costs.known if self.free or draft.free else self._ready)
            or draft.confidence is None
            or (own and draft.law is not None)
        ):
            return draft
        self._rated = True
        rating = torch.where(draft.valid, draft.confidence.cpu().float(), 0.0)
        trust = (self._hits + self.trust_weight) / (self._claimed + self.trust_weight)
        best, order = rating.sort(dim=1, descending=True, stable=True)  # parents before children: paths only lose
        expected = sum(going) + (trust * best).clamp(max=1).sum(0).cumsum(0)
        rates = [self.margin * sum(going) / self.costs.plain]
        rates += [tokens / self.costs.seconds(n) for n, tokens in enumerate(expected.tolist(), 1)]
        nodes = max(range(len(rates)), key=rates.__getitem__)
        if not draft.free:
            self._used = self.memory * self._used + (1 - self.memory) * nodes
        self._mass = float(best[:, :nodes].sum())
        if nodes == 0:
            return Draft.empty(draft.shape[0], draft.tokens.device)
        if nodes == draft.shape[1]:
            return draft
        return prune(draft, order.argsort(dim=1) < nodes, looked_at_token=own)

    @property
    def _ready(self) -> bool:
        """Whether to decide anything; in a call that measures no later and no earlier than in those after it."""
        return self.costs.known and self.rounds >= self.warm_up

    @property
    def free_only(self) -> bool:
        return self.free_part and not self._asked

    def before(self, rows: list[int]) -> list[int]:
        """Length for each of the request's rows `rows`; 0 for all while drafting does not pay."""
        self._asked = self.gain >= self.margin or self.waited >= self.gap
        self._spared = False
        lengths = self.inner.before(rows)
        if not self._asked and not self.free_part:
            return [0] * len(rows)
        return lengths if self.depth is None else [min(length, self.depth) for length in lengths]

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
        """Hear the offered depth and the committed tokens of each row."""
        self.inner.observe(rows, offered, committed)
        self._hits = self.trust_memory * self._hits + sum(len(t) - 1 for d, t in zip(offered, committed) if d and t)
        self._claimed = self.trust_memory * self._claimed + self._mass
        self._mass = 0.0
        if self._rated and self.free:
            return
        self.waited += 1
        if not self._asked or self._spared or self.free and not any(offered):
            return
        ready = self._ready
        self.rounds += 1
        self.waited = 0
        self._count([(depth, len(tokens) - 1) for depth, tokens in zip(offered, committed) if tokens])
        if ready:
            self._judge()

    def _count(self, outcomes: list[tuple[int, int]]) -> None:
        """Add one round's (offered, accepted) levels of each row. A row without an offer counts as a failure: its share
        of the pass, or at least its draft, was paid for nothing."""
        deepest = max(1, *(depth for depth, _ in outcomes))
        memory = self.memory if self.gain >= self.margin else self.memory_off
        for counts in (self._reached, self._passed):
            counts[:] = [memory * c for c in counts] + [0.0] * (deepest - len(counts))
        for depth, accepted in outcomes:
            for level in range(min(max(1, depth), accepted + 1)):
                self._reached[level] += 1 / len(outcomes)
                self._passed[level] += (level < accepted) / len(outcomes)

    def _judge(self) -> None:
        """Choose the depth with the greatest gain."""
        full = max(self.full, *self.inner.lengths)
        self.gain, chance, reach, expected = 0.0, self.prior, 1.0, 1.0
        for depth in range(1, full + 1):
            reached, passed = (c[depth - 1] if depth <= len(c) else 0.0 for c in (self._reached, self._passed))
            chance = (passed + self.prior_weight * chance) / (reached + self.prior_weight)
            reach *= chance
            expected += reach
            gain = expected * self.costs.plain / self._seconds(depth)
            if gain > self.gain and (self.adaptive or depth == full):
                self.gain, self.depth = gain, depth
        self.gap = (self._seconds(self.depth) / self.costs.plain - 1) / self.spend

    def _seconds(self, depth: int) -> float:
        share = depth / self.full if self.sequential else 1.0
        nodes = self._used if self._rated and (self.nodes or self.free_part) else self.nodes or depth
        return self.costs.seconds(nodes) + self.costs.draft * share
