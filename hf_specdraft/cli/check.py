"""hf-specdraft check: is assisted output plain's output, and does it pay?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import evaluation
from .options import (
    SPEC,
    Device,
    Dtype,
    DtypeOption,
    MaxNewTokens,
    PackCpu,
    PerCategory,
    Prompts,
    Target,
    TemplateKwargs,
    warn_of_template,
)


def check(
    target: Target,
    prompts: Prompts,
    drafter: Annotated[str, typer.Option(help=SPEC)] = "ngram",
    per_category: PerCategory = None,
    max_new_tokens: MaxNewTokens = 64,
    sample: Annotated[bool, typer.Option(help="Also compare the laws of sampled tokens.")] = False,
    draws: Annotated[int, typer.Option(min=2, help="For --sample: draws of each kind.")] = 256,
    temperature: Annotated[float, typer.Option(help="For --sample.")] = 1.0,
    chat_template_kwargs: TemplateKwargs = "{}",
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
    pack_cpu: PackCpu = False,
) -> None:
    """Compare assisted with plain output on prompts: every difference gets a verdict. Exit status 1 on a real fault."""
    model, tokenizer = evaluation.load_target(target, dtype.value, device, pack_cpu)
    inputs = {
        p.id: evaluation.encode(tokenizer, p.text, model.device, template_kwargs=chat_template_kwargs)
        for p in evaluation.read_prompts(prompts, per_category)
    }
    loaded = evaluation.load_drafter(drafter, dtype.value, device, pack_cpu)
    warn_of_template([loaded], tokenizer, chat_template_kwargs)
    console = Console()
    report = evaluation.check(
        model,
        loaded,
        inputs,
        max_new_tokens,
        draws=draws if sample else 0,
        sampling={"temperature": temperature},
        progress=track_calls(len(inputs), console),
    )
    show(report, tokenizer, console)
    raise typer.Exit(0 if report.lossless else 1)


def track_calls(total: int, console: Console):
    """A function that moves a progress bar one step forward each time it is called."""
    steps = iter(track(range(total + 1), description="prompts", console=console, transient=True))
    next(steps)
    return lambda: next(steps, None)


def show(report: evaluation.CheckReport, tokenizer, console: Console) -> None:
    """Print a report."""
    equal = report.prompts - len(report.differences)
    console.print(f"greedy text equal to plain's: {equal} of {report.prompts} prompts")
    for prompt, d in report.differences.items():
        plain, other = (
            "the end" if t is None else f"{t} {tokenizer.decode([t])!r}" for t in (d.plain_token, d.other_token)
        )
        console.print(
            f"  {prompt}: new token {d.position} is {other}, plain's is {plain}; logit gap of plain's best two "
            f"{d.gap:.3g}, other token lies {d.shortfall:.3g} below, rounding explains {d.tolerance:.3g}: {d.verdict}",
            markup=False,
        )
    for prompt, d in report.distances.items():
        verdict = "within noise" if d.within_noise else evaluation.FAULT
        console.print(
            f"sampled law of {d.tokens} tokens, {prompt}: TV {d.tv:.3f}, plain against plain {d.noise:.3f} "
            f"({d.draws} draws, p = {d.p_value:.3f}): {verdict}",
            markup=False,
        )

    if report.offered_by_depth:
        depths = Table("depth", "offered", "accepted", "acceptance", title="acceptance by position")
        for i, (offered, accepted) in enumerate(zip(report.offered_by_depth, report.accepted_by_depth), 1):
            depths.add_row(str(i), str(offered), str(accepted), f"{accepted / offered:.0%}" if offered else "-")
        console.print(depths)
    total, target, draft = report.assisted_seconds, report.target_seconds, report.draft_seconds
    console.print(
        f"assisted time {total:.2f} s: target {target / total:.1%}, drafter {draft / total:.1%}, "
        f"rest {(total - target - draft) / total:.1%}; plain {report.plain_seconds:.2f} s"
    )
    console.print(
        f"tau {report.tau:.2f}; a round costs {report.round_seconds * 1e3:.1f} ms, a plain token "
        f"{report.token_seconds * 1e3:.1f} ms: break-even at tau {report.break_even:.2f}"
    )
