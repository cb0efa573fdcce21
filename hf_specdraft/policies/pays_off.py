"""Drafting as deep as pays, and hardly ever while nothing does."""

from __future__ import annotations

import torch

from ..draft import Draft
from ..trees import prune
from .base import Policy
from .costs import WARM_UP, Costs
from .fixed import FixedLength


class PaysOff(Policy):
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

    warm_up = WARM_UP  # drafted rounds of every call before the first judgement
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
        """Only the nodes worth verifying.

        Cutting by ratings that looked at drawn tokens makes drawn rows point rows, so such a draft is left as it is.
        """
        looked = draft.confidence_kind != "prior"
        self._spared = draft.free
        # A free drafter needs no warm-up: its ratings say from the first round on what is worth verifying.
        if (
            not (self.costs.known if self.free or draft.free else self._ready)
            or draft.confidence is None
            or (looked and draft.law is not None)
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
        return prune(draft, order.argsort(dim=1) < nodes, looked_at_token=looked)

    @property
    def _ready(self) -> bool:
        """Whether to decide anything; in a call that measures no later and no earlier than in those after it."""
        return self.costs.known and self.rounds >= self.warm_up

    @property
    def free_only(self) -> bool:
        return self.free_part and not self._asked

    def before(self, rows: list[int], outlook=None) -> list[int]:
        """0 for all while drafting does not pay."""
        self._asked = self.gain >= self.margin or self.waited >= self.gap
        self._spared = False
        lengths = self.inner.before(rows)
        if not self._asked and not self.free_part:
            return [0] * len(rows)
        return lengths if self.depth is None else [min(length, self.depth) for length in lengths]

    def observe(self, rows: list[int], offered: list[int], committed: list[list[int]]) -> None:
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
