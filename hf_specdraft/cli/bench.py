"""hf-specdraft bench: drafters against plain generate and transformers' prompt lookup."""

from __future__ import annotations

import sys
from pathlib import Path
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


def bench(
    target: Target,
    prompts: Prompts,
    drafter: Annotated[list[str], typer.Option(help=SPEC + " May be given several times.")] = ("ngram",),
    per_category: PerCategory = None,
    max_new_tokens: MaxNewTokens = 128,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is run.")] = 1,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy; above, each repeat samples by a seed of its own.")
    ] = 0.0,
    prompt_lookup_num_tokens: Annotated[
        int, typer.Option(min=0, help="Draft length of transformers' lookup; 0 leaves it out.")
    ] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all measurements here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw tau and speed here (PNG).")] = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    dtype: DtypeOption = Dtype.float32,
    drafter_dtype: Annotated[
        Dtype | None, typer.Option(help="The drafters' weights, where not as the target's.")
    ] = None,
    device: Device = "cpu",
    pack_cpu: PackCpu = False,
) -> None:
    """Measure tau and speed of drafters, plain generate and prompt lookup, prompt by prompt in turn."""
    model, tokenizer = evaluation.load_target(target, dtype.value, device, pack_cpu)
    chosen = evaluation.read_prompts(prompts, per_category)
    methods = evaluation.baselines(prompt_lookup_num_tokens)
    for spec in drafter:
        methods[spec] = {
            "assistant_model": evaluation.load_drafter(spec, (drafter_dtype or dtype).value, device, pack_cpu)
        }
    drafters = [arguments["assistant_model"] for name, arguments in methods.items() if name in drafter]
    warn_of_template(drafters, tokenizer, chat_template_kwargs)
    # A pipe has no width of its own, and 80 columns would cut the method names.
    console = Console(width=None if sys.stdout.isatty() else 120)
    measured = evaluation.bench(
        model, tokenizer, chosen, methods, max_new_tokens, repeats, chat_template_kwargs, temperature
    )
    total = len(chosen) * len(methods) * repeats
    records = list(track(measured, total=total, description="runs", console=console, transient=True))
    rows = evaluation.summarise(records)
    console.print(table(rows))
    if json_file is not None:
        about = evaluation.provenance(
            target=target,
            drafters=list(drafter),
            prompts=prompts.name,
            prompts_sha256=evaluation.sha256(prompts),
            per_category=per_category,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            temperature=temperature,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            chat_template_kwargs=chat_template_kwargs,
            dtype=str(model.dtype).removeprefix("torch."),
            drafter_dtype=drafter_dtype and drafter_dtype.value,
            device=str(model.device),
            pack_cpu=pack_cpu,
        )
        evaluation.write_json(json_file, rows, records, about)
    if plot_file is not None:
        evaluation.plot(rows, plot_file)


def table(rows: list[evaluation.Row]) -> Table:
    """The benchmark's rows for the terminal. "outside": share of the time in neither target nor drafter forwards."""
    view = Table("category", "method", "tau", "tokens/s", "x plain", "decoding x plain", "x lookup", "equal", "outside")
    for row in rows:
        if view.rows and row.method == evaluation.PLAIN:
            view.add_section()
        view.add_row(
            row.category,
            row.method,
            f"{row.tau:.2f}" + ("" if row.tau_interval is None else " ({:.2f}-{:.2f})".format(*row.tau_interval)),
            f"{row.tokens_per_second:.1f}",
            _spread(row.to_plain),
            _spread(row.decoding_to_plain),
            _spread(row.to_lookup),
            "-" if row.equal is None else f"{row.equal}/{row.prompts}",
            "-" if row.outside is None else f"{row.outside:.1%}",
        )
    return view


def _spread(ratio: tuple[float, float, float] | None) -> str:
    if ratio is None:
        return "-"
    middle, low, high = ratio
    return f"{middle:.2f}" if low == high else f"{middle:.2f} ({low:.2f}-{high:.2f})"
