"""Tokens per second over the batch: plain generate, fixed drafts, and drafts budgeted by D-Cut, DSpark and ForeSpark.

    python scripts/batch_scaling.py DRAFTER --out batch_scaling

Greedy. Methods take turns within each repeat, so that a slow minute of the machine hits all of them. Writes OUT.json
and OUT.png; exit status 1 when a text differs from plain's. Batches are made of the file's prompts in turn.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from get_model import get_model
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.utils import logging

from hf_specdraft import evaluation

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "plain"
POLICIES = {"fixed length": "fixed", "D-Cut": "d_cut", "DSpark": "dspark_batch", "ForeSpark": "forespark"}


def main(
    drafter: Annotated[str, typer.Argument(help="The drafter, as for `hf-specdraft bench`: NAME[:key=value,...].")],
    model: Annotated[str | None, typer.Option(help="The target's folder or Hub name; the demo's by default.")] = None,
    prompts: Annotated[Path, typer.Option(help="Prompts (.jsonl).")] = ROOT / "examples" / "prompts.jsonl",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16",
    new_tokens: Annotated[int, typer.Option(help="New tokens of each row.")] = 64,
    repeats: Annotated[int, typer.Option(help="Measurements of each method; one more warms up.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of the target; bfloat16's near ties may fall otherwise.")] = "float32",
    draft_dtype: Annotated[str, typer.Option(help="Of the drafter.")] = "float32",
    pack: Annotated[bool, typer.Option(help="Whether linear layers are packed, in plain runs as well.")] = True,
    device: Annotated[str, typer.Option()] = "cpu",
    out: Annotated[Path, typer.Option(help="Files to write, without their endings.")] = Path("batch_scaling"),
) -> None:
    logging.disable_progress_bar()
    target, tokenizer = evaluation.load_target(model or str(get_model()), dtype, device, pack)
    network = evaluation.load_drafter(drafter, draft_dtype, device, pack)
    texts = [prompt.text for prompt in evaluation.read_prompts(prompts)]
    rows = [evaluation.encode(tokenizer, text)["input_ids"][0] for text in texts]
    methods = {PLAIN: None, **{name: with_policy(network, policy) for name, policy in POLICIES.items()}}
    sizes = [int(size) for size in batches.split(",")]
    results = [
        measured(target, padded(rows, size, int(tokenizer.pad_token_id or 0), device), methods, new_tokens, repeats)
        for size in sizes
    ]
    about = evaluation.provenance(
        drafter=drafter,
        prompts=prompts.name,
        new_tokens=new_tokens,
        repeats=repeats,
        dtype=dtype,
        draft_dtype=draft_dtype,
        pack=pack,
        device=device,
    )
    report = {"about": about, "batches": dict(zip(sizes, results))}
    out.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    show(report)
    plot(report, out.with_suffix(".png"))
    sys.exit(any(not entry["equal"] for result in results for entry in result.values()))


def with_policy(drafter: Any, policy: str) -> Any:
    """The same weights under another policy."""
    other = copy.copy(drafter)
    other.config = copy.copy(drafter.config)
    other.config.policy = policy
    return other


def padded(rows: list[Tensor], batch: int, pad: int, device: str) -> dict[str, Tensor]:
    """`batch` left-padded rows, taken in turn."""
    chosen = [rows[n % len(rows)] for n in range(batch)]
    width = max(map(len, chosen))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in chosen])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in chosen]).long()
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def measured(target: Any, inputs: dict, methods: dict[str, Any], new_tokens: int, repeats: int) -> dict[str, dict]:
    """Per method: tokens per second of each repeat (rows run for `new_tokens`, whatever end tokens they write), tau,
    the share of drafted tokens that was verified, and whether the text was plain's every time."""
    taken: dict[str, list] = {name: [] for name in methods}
    names = list(methods)
    for repeat in range(1 + repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            assisted = {} if methods[name] is None else {"assistant_model": methods[name]}
            start = time.perf_counter()
            output = target.generate(
                **inputs,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                **assisted,
            )
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            taken[name].append((time.perf_counter() - start, output))
    plain = taken[PLAIN][0][1].sequences
    results = {}
    for name, runs in taken.items():
        stats = getattr(runs[-1][1], "speculation", None)
        results[name] = {
            # The first is warm-up: prices and kernels are measured and chosen there.
            "tokens_per_second": [plain.shape[0] * new_tokens / seconds for seconds, _ in runs[1:]],
            "tau": stats and stats.tau,
            "verified": stats and stats.verified / max(1, stats.drafted),
            "equal": all(torch.equal(output.sequences, plain) for _, output in runs),
        }
    return results


def spread(entry: dict) -> tuple[float, float, float]:
    speeds = entry["tokens_per_second"]
    return statistics.median(speeds), min(speeds), max(speeds)


def show(report: dict) -> None:
    table = Table("batch", "method", "tokens/s (lowest to highest)", "x plain", "tau", "verified", "same text")
    for size, result in report["batches"].items():
        plain = spread(result[PLAIN])[0]
        for name, entry in result.items():
            middle, low, high = spread(entry)
            tau, share = (f"{entry[key]:.2f}" if entry[key] is not None else "" for key in ("tau", "verified"))
            speed = f"{middle:.1f} ({low:.1f} to {high:.1f})"
            table.add_row(
                str(size), name, speed, f"{middle / plain:.2f}", tau, share, "yes" if entry["equal"] else "NO"
            )
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def plot(report: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sizes = list(report["batches"])
    for name in next(iter(report["batches"].values())):
        middles, lows, highs = zip(*(spread(report["batches"][size][name]) for size in sizes))
        errors = [[m - low for m, low in zip(middles, lows)], [high - m for m, high in zip(middles, highs)]]
        axes.errorbar(sizes, middles, yerr=errors, marker="o", markersize=4, capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="batch", ylabel="tokens per second, all rows", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
