"""What a target and a drafter take, measured once and kept for the life of the process.

`Costs` is what one kind of call took while it ran; `Prices` is a table of passes of any size, measured apart from any.
"""

from __future__ import annotations

import itertools
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache import RowCache, record_past
from ..draft import Commit, Context, Features
from ..speculation import Clock

if TYPE_CHECKING:
    from ..drafters.base import Drafter
    from .base import Situation


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


# ---- passes of any size ----

Point = tuple[int, int, int]  # rows, tokens a row, columns of context
# The shortest context that is measured, and the one that drafts are measured behind.
SHORT = 16


def profile(target: PreTrainedModel, rows: int, nodes: int, context: int, repeats: int = 3) -> float:
    """Seconds of one pass of the target over `rows` anchors with `nodes` nodes each behind `context` columns: the least
    of `repeats` after a first one. The cache is filled with one token's keys, so that it costs no prefill."""
    device = target.device
    with torch.no_grad():
        cache = DynamicCache(config=target.config.get_text_config())
        record_past(cache, True)
        _pass(target, cache, RowCache(cache, rows, None), 1)
        stretched = RowCache(cache, rows, None)
        stretched.lay_out([context - 1] * rows, context)
        if rows > 1:  # rows of a batch are padded
            stretched.mask = torch.ones(rows, context, dtype=torch.long, device=device)
            stretched.mask[1:, 0] = 0
        seconds = []
        for _ in range(1 + repeats):
            clock = Clock(device)
            with clock("target"):
                _pass(target, cache, stretched, 1 + nodes)
            seconds.append(clock.snapshot()["target"])
            stretched.cache.crop(-1 - nodes)
    return min(seconds[1:])


def _pass(target: PreTrainedModel, cache: DynamicCache, rows: RowCache, width: int) -> None:
    ids = torch.zeros(rows.batch, width, dtype=torch.long, device=target.device)
    inputs = target.prepare_inputs_for_generation(
        ids,
        next_sequence_length=width,
        is_first_iteration=False,
        cache=cache,
        attention_mask=rows.mask_for(width) if rows.columns else None,
        use_cache=True,
    )
    target(**inputs, return_dict=True)


def profile_draft(target: PreTrainedModel, drafter: Drafter, rows: int, depth: int, repeats: int = 3) -> float:
    """Seconds of one draft of `depth` levels for `rows` rows, the reading of a new token of context included: the least
    of `repeats` after a first one, greedy, behind SHORT tokens."""
    from ..drafters.base import TargetView

    view = TargetView(target)
    session = drafter.start(view, rows)
    width = len(drafter.feature_layers) * view.hidden_size

    def commit(start: int, count: int, tokens: int) -> Commit:
        hidden = torch.zeros(rows, count, width, dtype=target.dtype, device=drafter.device)
        features = Features(hidden, [count] * rows, [start] * rows) if drafter.feature_layers else None
        return Commit([[0] * tokens for _ in range(rows)], features)

    session.observe(commit(0, SHORT, SHORT + 1))
    anchor = torch.zeros(rows, dtype=torch.long, device=target.device)
    seconds = []
    with torch.no_grad():
        for n in range(1 + repeats):
            clock = Clock(drafter.device)
            with clock("draft"):
                session.propose(Context(anchor, [SHORT + n] * rows, [depth] * rows, depth))
                session.observe(commit(SHORT + n, 1, 1))
            seconds.append(clock.snapshot()["draft"])
    return min(seconds[1:])


class PassTimes:
    """Seconds of a pass by rows, tokens a row, and columns of context.

    points: what is known, at powers of two. Each is measured when it is first needed; between them, and beyond the
    longest context, seconds lie on straight lines, and nothing is cheaper than something smaller.
    """

    def __init__(self, points: dict[Point, float], measure: Callable[[int, int, int], float]):
        self.points, self.measure = points, measure
        self._told: dict[tuple, float] = {}

    def seconds(self, rows: int, tokens: float, context: int) -> float:
        """Of a pass over `rows` rows of `tokens` tokens each (a mean may be given), behind `context` columns."""
        key = rows, tokens, context // SHORT
        if key not in self._told:
            axes = _between(rows), _between(tokens), _context(context)
            corners = [(point, w) for point, w in map(_corner, itertools.product(*axes)) if w]
            for point, _ in corners:
                if point not in self.points:
                    self.points[point] = self.measure(*point)
            self._told[key] = sum(weight * self._at(point) for point, weight in corners)
        return self._told[key]

    def _at(self, point: Point) -> float:
        """What is known at a point: no less than at those smaller in every respect."""
        return max(s for other, s in self.points.items() if all(a <= b for a, b in zip(other, point)))


def _between(value: float) -> list[tuple[int, float]]:
    """The powers of two around a number, with the weights that give it."""
    low = 1 << (int(value).bit_length() - 1)
    share = value / low - 1
    return [(low, 1 - share), (2 * low, share)]


def _context(columns: int) -> list[tuple[int, float]]:
    """Two contexts, none much longer than there is room for, from which a straight line leads to `columns`."""
    high = max(4 * SHORT, 1 << (columns.bit_length() - 1))
    share = max(0.0, (columns - high // 4) / (high - high // 4))
    return [(high // 4, 1 - share), (high, share)]


def _corner(parts: tuple[tuple[int, float], ...]) -> tuple[Point, float]:
    points, (a, b, c) = zip(*parts)
    return points, a * b * c


@dataclass
class Prices:
    """What verifying and drafting take, for policies that weigh them.

    packed: whether a pass over rows of unequal drafts costs its tokens, rather than the rectangle of its longest row.
    """

    passes: PassTimes
    drafts: PassTimes
    packed: bool = False

    def verify(self, rows: int, nodes: float, context: int) -> float:
        """A target pass over `nodes` nodes a row: of the longest row, or on average where unequal rows are packed."""
        return self.passes.seconds(rows, 1 + nodes, context)

    def draft(self, rows: int, depth: int) -> float:
        """A draft of this depth; 0 for none."""
        return self.drafts.seconds(rows, depth, SHORT) if depth else 0.0


_points: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def prices_of(situation: Situation, file: str | Path | None = None) -> Prices:
    """The prices of a call: measured once per target, drafter, device and dtype, and kept for the life of the process.

    file: a JSON file that holds them; what is not in it is measured when it is needed, and written to it. Without one,
        prices of calls whose drafts are drawn go by the number of weights (see `nominal_costs`).
    Raises ValueError when the file was written for another target, drafter, device or dtype.
    """
    target, drafter = situation.target, situation.drafter
    if situation.sampled and file is None:
        return _nominal_prices(target, drafter)
    kind = f"{target.device} {target.dtype} {target.config.get_text_config()._attn_implementation}"
    per_target = _points.setdefault(target, {"passes": {}, "drafts": weakref.WeakKeyDictionary()})
    passes = per_target["passes"].setdefault(kind, {})
    drafts = per_target["drafts"].setdefault(drafter, {}).setdefault(f"{kind} {drafter.device} {drafter.dtype}", {})
    kept = None if file is None else _Kept(Path(file), target, drafter, kind, passes, drafts)

    def told(measure: Callable[[int, int, int], float], points: dict) -> Callable[[int, int, int], float]:
        def measured(*point: int) -> float:
            seconds = points[point] = measure(*point)
            if kept is not None:
                kept.save()
            return seconds

        return measured

    def one_pass(rows: int, tokens: int, context: int) -> float:
        return profile(target, rows, tokens - 1, context)

    def one_draft(rows: int, depth: int, context: int) -> float:
        return 0.0 if drafter.is_free else profile_draft(target, drafter, rows, depth)

    return Prices(PassTimes(passes, told(one_pass, passes)), PassTimes(drafts, told(one_draft, drafts)))


def _nominal_prices(target: PreTrainedModel, drafter: Drafter) -> Prices:
    size = target.num_parameters()
    one = drafter.num_parameters() / size if size else 1.0
    return Prices(
        PassTimes({}, lambda rows, tokens, context: 1.0 + NOMINAL_NODE * (rows * tokens - 1)),
        PassTimes({}, lambda rows, depth, context: one * (depth if drafter.is_sequential else 1)),
    )


class _Kept:
    """A file of prices."""

    def __init__(self, path: Path, target: PreTrainedModel, drafter: Drafter, kind: str, passes: dict, drafts: dict):
        self.path, self.points = path, {"passes": passes, "drafts": drafts}
        weights = {"target": (target, kind), "drafter": (drafter, f"{drafter.device} {drafter.dtype}")}
        self.made_for = {
            name: f"{type(model).__name__} of {model.num_parameters()} weights, {where}"
            for name, (model, where) in weights.items()
        }
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, points in self.points.items():
                points.update({(rows, tokens, context): s for rows, tokens, context, s in content[name]})
            made_for = {name: content[name] for name in self.made_for}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file of prices ({error!r}); delete it to have them measured") from error
        if made_for != self.made_for:
            raise ValueError(
                f"{path} holds prices of {made_for['target']} with {made_for['drafter']}, not of "
                f"{self.made_for['target']} with {self.made_for['drafter']}; name another file"
            )

    def save(self) -> None:
        content = {name: [[*point, s] for point, s in sorted(points.items())] for name, points in self.points.items()}
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        part.write_text(json.dumps({**self.made_for, **content}, indent=1), encoding="utf-8")
        part.replace(self.path)
