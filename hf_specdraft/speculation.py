"""What a call of generate gained: counts by row and depth, and where the time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Speculation:
    """Statistics of one call, on the returned output as `.speculation`.

    tokens: new tokens per row. rounds: target passes per row after the prefill that gave it some of those.
    offered_by_depth / accepted_by_depth: drafted nodes verified at each depth (index 0 = first drafted token; a tree
        counts once per row and depth) and those accepted.
    drafted / verified / accepted: nodes proposed, nodes scored by the target, nodes committed.
    paused_rounds: rounds in which the policy asked for no draft, or kept nothing of one, although there was room.
    seconds: "target", "draft", "verify", "commit" and "total" wall-clock seconds of the call.
    """

    tokens: list[int]
    rounds: list[int]
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    paused_rounds: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean tokens committed per row and target pass, bonus token included, prefill and its token excluded."""
        passes = sum(self.rounds)
        return sum(max(0, t - 1) for t in self.tokens) / passes if passes else 1.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the verified nodes."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def rest(self) -> float:
        """Seconds outside target and drafter: verification, re-alignment, stopping, streaming."""
        return self.seconds["total"] - self.seconds["target"] - self.seconds["draft"]

    def offer(self, depths: list[int], nodes: int) -> None:
        """Add one round's draft: how deep each row's goes, and its nodes in all rows."""
        self.verified += nodes
        _add_levels(self.offered_by_depth, depths)

    def settle(self, tokens: list[int], passes: list[list[int]]) -> None:
        """Set what each row got, given its new tokens and how many each of its passes committed. Those beyond `tokens`
        were taken back, because all rows end where the last one stops or time runs out."""
        self.tokens = tokens
        paths = []
        for row, committed in enumerate(passes):
            left = tokens[row] - 1  # the first token is the prefill's
            for count in committed:
                if left <= 0:
                    break
                self.rounds[row] += 1
                paths.append(min(count, left) - 1)
                left -= count
        self.accepted = sum(paths)
        self.accepted_by_depth = [0] * len(self.offered_by_depth)
        _add_levels(self.accepted_by_depth, paths)


def _add_levels(counts: list[int], depths: list[int]) -> None:
    """Add one to each of the first `depth` counts, for every depth."""
    for depth, times in Counter(depths).items():
        counts.extend([0] * (depth - len(counts)))
        for level in range(depth):
            counts[level] += times


class Clock:
    """Adds up where the time goes. On CUDA the device is read at `snapshot` only, from events in its own stream."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.device = device
        self.seconds = {"target": 0.0, "draft": 0.0, "verify": 0.0, "commit": 0.0}
        self._events: list[tuple] = []
        self._begin = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def snapshot(self) -> dict[str, float]:
        """Seconds so far by name; waits for the device."""
        if self._events:
            torch.cuda.synchronize(self.device)
            for name, begin, end in self._events:
                self.seconds[name] += begin.elapsed_time(end) / 1000
            self._events.clear()
        return dict(self.seconds)

    def finish(self) -> dict[str, float]:
        return {**self.snapshot(), "total": time.perf_counter() - self._begin}
