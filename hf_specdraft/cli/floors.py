"""hf-specdraft floors: how much of a drafter's rejection is unavoidable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import evaluation
from ..evaluation import rollouts as rolling
from .options import SPEC, Device, Dtype, DtypeOption, Target, TemplateKwargs, warn_of_template


def floors(
    target: Target,
    drafter: Annotated[str | None, typer.Option(help=SPEC)] = None,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Contexts: prompts, in JSON lines as for bench.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Contexts: a folder of `hf-specdraft data`.")] = None,
    rollouts: Annotated[int, typer.Option(min=2, help="Continuations sampled at each anchor.")] = 64,
    anchors: Annotated[int, typer.Option(min=1, help="Places in texts to measure at.")] = 20,
    slots: Annotated[int, typer.Option(min=1, help="Tokens of a draft.")] = 6,
    top_k: Annotated[int, typer.Option(min=2, help="Tokens of each law that are kept.")] = 256,
    seed: Annotated[int, typer.Option(help="Of what is sampled.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the numbers here (JSON).")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them here (PNG).")] = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
) -> None:
    """Measure the rejection that no drafter seeing none, or one, of its own tokens can avoid, at temperature 1; and a
    drafter's own beside it."""
    if (prompts is None) == (data is None):
        raise ValueError("give either --prompts or --data, for texts to measure at")
    model, tokenizer = evaluation.load_target(target, dtype.value, device)
    proposer = None if drafter is None else evaluation.load_drafter(drafter, dtype.value, device)
    torch.manual_seed(seed)
    if data is not None:
        contexts = rolling.contexts_of_data(data, anchors)
    else:
        chosen = evaluation.read_prompts(prompts)
        if proposer is not None:
            warn_of_template([proposer], tokenizer, chat_template_kwargs)
        contexts = rolling.contexts_of_prompts(model, tokenizer, chosen, anchors, **chat_template_kwargs)
    console = Console(width=None if sys.stdout.isatty() else 120)
    contexts = track(contexts, total=anchors, description="anchors", console=console, transient=True)
    report = rolling.measure(model, contexts, proposer, rollouts, slots, top_k)
    console.print(table(report))
    if out is not None:
        about = dict(target=target, drafter=drafter, rollouts=rollouts, top_k=top_k, seed=seed, dtype=dtype.value)
        rolling.write(report, out, {**about, "texts": str(prompts or data)})
    if plot_file is not None:
        rolling.plot(report, plot_file)


def table(report: rolling.Report) -> Table:
    """Floors T of orders 0 and 1 (with what a split in halves gives), and the drafter's rejection R."""
    columns = ["slot", "T order 0", "split", "T order 1", "split", "members"]
    view = Table(*columns, *(["R", "R serving", "gap"] if report.drafter else []), title=_title(report))
    for slot in report.slots:
        cells = [str(slot.slot)]
        for order in (0, 1):
            cells += [_spread(slot.floor[order], slot.error[order]), _number(slot.split[order])]
        cells.append(_number(slot.size[1], 1))
        if report.drafter:
            cells += [_spread(slot.rejection, slot.rejection_error), _number(slot.serving), _number(slot.gap)]
        view.add_row(*cells)
    return view


def _title(report: rolling.Report) -> str:
    if not report.drafter:
        return f"{report.anchors} anchors"
    reads = "all its tokens so far" if report.order is None else f"{report.order} of its tokens"
    return f"{report.anchors} anchors; the drafter sees {reads}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(value: float | None, error: float | None) -> str:
    return _number(value) if error is None else f"{_number(value)} ± {error:.3f}"
