"""What a target and a drafter take, measured once and kept for the life of the process."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field


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
        return len(self._rounds) >= WARM_UP

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


# Drafted rounds of every call before the first judgement: so many the first call needs to measure.
WARM_UP = 3
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
