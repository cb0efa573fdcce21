"""Information floors of a real target, and a drafter's rejection beside them: the work behind `hf-specdraft floors`."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import record_past, refuse_uncuttable
from ..drafters.base import Drafter, TargetView, end_ids
from ..training.anchors import choose_anchors
from ..training.data import collate, load
from ..training.features import LiveFeatures
from ..training.records import TrainingBatch
from . import floors
from .inputs import Prompt, encode

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


@dataclass
class Slot:
    """Means over the anchors, at one slot (0 the one after the anchor); None where nothing could be told.

    floor, split, residual, size: by order, 0 and 1: the floor, its split-half estimate, the mass that truncation
    dropped, and the effective number of members. error: the floor's standard error over anchors.
    rejection: the drafter's E[TV]; serving: the same among drafts that get so far; gap: rejection minus the floor of
    the drafter's order (0 for one that sees all tokens before).
    """

    slot: int
    floor: list[float | None]
    error: list[float | None]
    split: list[float | None]
    residual: list[float | None]
    size: list[float | None]
    rejection: float | None = None
    rejection_error: float | None = None
    serving: float | None = None
    gap: float | None = None


@dataclass
class Report:
    """slots: by slot. anchors: how many. order: of the drafter (`Proposals`), None with `drafter` False, too."""

    slots: list[Slot]
    anchors: int
    drafter: bool
    order: int | None


def measure(
    target: PreTrainedModel,
    contexts: Iterable[Tensor],
    drafter: Drafter | None = None,
    rollouts: int = 64,
    slots: int = 6,
    top_k: int = 256,
) -> Report:
    """Floors of order 0 and 1 after each context [L] of tokens, and a drafter's rejection at the same slots.

    Chance is torch's default generator's. Raises ValueError for fewer than 2 rollouts, 1 slot or 2 tokens kept.
    """
    if rollouts < 2 or slots < 1 or top_k < 2:
        raise ValueError(f"expected rollouts and top_k from 2, slots from 1; got {rollouts}, {top_k}, {slots}")
    proposals, cells, distances, factors = None, [], [], []
    for context in contexts:
        rolled = roll_out(target, context, rollouts, slots, top_k, end_ids(target))
        cells.append([[_cell(rolled, slot, order) for order in (0, 1)] for slot in range(slots)])
        if drafter is not None:
            proposals = proposals or Proposals(drafter, target, context, rolled.tokens[-1])
            pair = _rejections(rolled, proposals(context, rolled.tokens[:rollouts]))
            distances.append(pair[0])
            factors.append(pair[1])
    if not cells:
        raise ValueError("there is no anchor to measure at")
    means = torch.tensor(cells, dtype=torch.float64)  # [A, S, 2 orders, 4]
    slots_of = []
    for k in range(slots):
        columns = [[_number(means[:, k, m, i].nanmean()) for m in (0, 1)] for i in range(4)]
        errors = [_error(means[:, k, m, 0]) for m in (0, 1)]
        slots_of.append(Slot(k, columns[0], errors, *columns[1:]))
    report = Report(slots_of, len(cells), drafter is not None, proposals.order if proposals else None)
    if proposals:
        by_anchor = torch.stack([d.nanmean(0) for d in distances])  # [A, S]
        serving = floors.serving_risk(torch.cat(distances), torch.cat(factors))
        for slot, column, risk in zip(report.slots, by_anchor.T, serving):
            slot.rejection, slot.rejection_error = _number(column.nanmean()), _error(column)
            slot.serving = _number(risk)
            least = 0.0 if report.order is None or slot.slot < report.order else slot.floor[report.order]
            if slot.rejection is not None and least is not None:
                slot.gap = slot.rejection - least
    return report


def _cell(rolled: Rollouts, slot: int, order: int) -> tuple[float, float, float, float]:
    """(floor, split-half floor, dropped mass, effective size) of one cell; NaN where there is none."""
    if slot < order:
        return (math.nan,) * 4
    laws = rolled.laws[slot] if order == 0 else rolled.forced[slot - 1]
    # The realised row chose the predecessor: it is no member. Tokens behind an end are none that anybody drafts.
    alive = rolled.alive[:-1, slot - order]
    weights = alive.double()
    if order:
        if not rolled.alive[-1, slot]:
            return (math.nan,) * 4
        weights = weights * floors.importance(rolled.log_weights[slot - 1][:-1])
    if not weights.sum() > 0:
        return (math.nan,) * 4
    probs = Laws(laws.ids[:-1], laws.probs[:-1], laws.residual[:-1]).dense()
    split = floors.split_floor(probs, weights, torch.randperm(len(probs)))
    return floors.floor(probs, weights), split, float(laws.residual[:-1][alive].mean()), floors.effective_size(weights)


def _rejections(rolled: Rollouts, laws: Tensor) -> tuple[Tensor, Tensor]:
    """Along the members, [M, S'] each: TV of target and drafter, NaN behind an end, and min(1, q / p) of the token."""
    members, slots = laws.shape[:2]
    q = laws.to(rolled.tokens.device)
    distance = torch.stack(
        [
            Laws(law.ids[:members], law.probs[:members], law.residual[:members]).distance(q[:, k])
            for k, law in enumerate(rolled.laws[:slots])
        ],
        dim=1,
    ).where(rolled.alive[:members, :slots], math.nan)
    drafted = q.gather(2, rolled.tokens[:members, :slots, None])[..., 0]
    return distance, (drafted / rolled.probs[:members, :slots]).clamp(max=1).double()


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)


def _error(values: Tensor) -> float | None:
    """Standard error of the mean of those that are numbers."""
    values = values[~values.isnan()]
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else None


def contexts_of_data(folder: str | Path, count: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """`count` contexts [L] of a data folder's held-out texts (its training texts where none are held out), each ending
    in an anchor, one a document until there are no more."""
    train, held_out, _ = load(folder)
    rows = train if held_out is None else held_out
    for index in torch.randperm(len(rows), generator=generator).tolist()[:count]:
        batch = collate([rows[index]], 0)
        batch.pop("index", None)
        batch = TrainingBatch(**batch)
        anchors = choose_anchors(batch, None)[0].nonzero().flatten()
        if len(anchors):
            anchor = int(anchors[torch.randint(len(anchors), (), generator=generator)])
            yield batch.input_ids[0, anchor - int(batch.position_ids[0, anchor]) : anchor + 1]


def contexts_of_prompts(
    target: PreTrainedModel, tokenizer: Any, prompts: list[Prompt], count: int, answer: int = 64, **template: Any
) -> Iterator[Tensor]:
    """`count` contexts: prompts in turn, each with a part, drawn uniformly, of an answer of at most `answer` tokens
    that the target samples at temperature 1. template: the chat template's arguments."""
    for i in range(count):
        inputs = encode(tokenizer, prompts[i % len(prompts)].text, target.device, template_kwargs=template)
        known = inputs["input_ids"].shape[1]
        sampled = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0)
        ids = target.generate(**inputs, max_new_tokens=answer, **sampled)[0]
        # The end token, where there is one, is never an anchor.
        yield ids[: known + int(torch.randint(1, max(2, len(ids) - known), ()))]


def write(report: Report, path: str | Path, about: dict[str, Any]) -> None:
    """Write a report as JSON, with what it is about."""
    Path(path).write_text(json.dumps({"about": about, **asdict(report)}, indent=1) + "\n", encoding="utf-8")


def plot(report: Report, path: str | Path) -> None:
    """Draw the floors of both orders, and the drafter's rejection, over slots (PNG)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    at = [slot.slot for slot in report.slots]

    def line(values: list, errors: list, label: str, **style: Any) -> None:
        values, errors = ([math.nan if x is None else x for x in numbers] for numbers in (values, errors))
        axes.errorbar(at, values, yerr=errors, label=label, marker=".", capsize=2, **style)

    for order in (0, 1):
        name = f"floor of order {order}"
        line([s.floor[order] for s in report.slots], [s.error[order] for s in report.slots], name, linestyle="--")
    if report.drafter:
        reads = "all tokens before" if report.order is None else f"order {report.order}"
        line([s.rejection for s in report.slots], [s.rejection_error for s in report.slots], f"drafter ({reads})")
        line([s.serving for s in report.slots], [None] * len(at), "drafter, of drafts that get there", linestyle=":")
    axes.set(xlabel="slot", ylabel="rejection probability", ylim=(0, 1), xticks=at)
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
