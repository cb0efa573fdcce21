"""Information floors of a real target, and a drafter's rejection beside them: the work behind `hf-specdraft floors`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.base import Drafter, end_ids
from ..training.anchors import choose_anchors
from ..training.data import collate, load
from ..training.records import TrainingBatch
from . import floors
from .inputs import Prompt, encode
from .laws import Laws, Proposals, Rollouts, roll_out


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
