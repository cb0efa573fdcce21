"""Drafters against plain generate and prompt lookup, prompt by prompt in turn."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from . import runs
from .inputs import Prompt, encode
from .runs import ratio

PLAIN, LOOKUP, OVERALL = "plain", "prompt-lookup", "overall"


@dataclass
class Record:
    """One measured call of the benchmark, without its text. `equal`: whether the text is plain's; None when sampled,
    where another draft spends other random numbers."""

    prompt: str
    category: str
    method: str
    repeat: int
    tokens: int
    passes: int
    committed: int
    seconds: float
    prefill_seconds: float
    target_seconds: float | None
    draft_seconds: float | None
    equal: bool | None


@dataclass
class Row:
    """A category (or "overall") and a method, over all prompts and repeats.

    tau: tokens committed per target pass, pooled over the prompts. tau_interval: of 95 % (`interval`), None for one
        prompt. tokens_per_second: median over repeats.
    to_plain, to_lookup: speed over that of plain generate and of prompt lookup: median, lowest, highest repeat; None
        where prompt lookup was not measured.
    decoding_to_plain: the same over plain generate, the prefill pass left out of both.
    equal: prompts whose text was plain's in every repeat, out of `prompts`; None when sampled.
    outside: share of the wall time spent in neither the target's nor the drafter's forward; None when unknown.
    """

    category: str
    method: str
    prompts: int
    tau: float
    tokens_per_second: float
    to_plain: tuple[float, float, float]
    to_lookup: tuple[float, float, float] | None
    decoding_to_plain: tuple[float, float, float]
    equal: int | None
    outside: float | None
    tau_interval: tuple[float, float] | None = None


def baselines(prompt_lookup_num_tokens: int = 10) -> dict[str, dict[str, Any]]:
    """generate's arguments for the methods every benchmark runs; prompt lookup only where it may draft a token."""
    lookup = {LOOKUP: {"prompt_lookup_num_tokens": prompt_lookup_num_tokens}} if prompt_lookup_num_tokens else {}
    return {PLAIN: {}, **lookup}


def bench(
    target: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    methods: dict[str, dict[str, Any]],
    max_new_tokens: int = 128,
    repeats: int = 1,
    template_kwargs: dict[str, Any] | None = None,
    temperature: float = 0.0,
) -> Iterator[Record]:
    """Run every method on every prompt, one row at a time; yields a record per call.

    temperature: 0 is greedy. Above, each repeat samples by a seed of its own.

    methods: name -> generate's arguments, plain generate's among them (`baselines`). All methods of a prompt run one
    after the other, so that a slow minute of the machine hits all of them, and each repeat starts with another method.
    Each method runs once unrecorded first. template_kwargs: as for `encode`.
    """

    def inputs_of(prompt: Prompt) -> dict[str, Any]:
        return encode(tokenizer, prompt.text, target.device, template_kwargs=template_kwargs)

    names = list(methods)
    for arguments in methods.values():
        runs.run(target, inputs_of(prompts[0]), min(32, max_new_tokens), temperature=temperature, **arguments)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            inputs = inputs_of(prompt)
            turn = (repeat + index) % len(names)
            measured = {
                name: runs.run(target, inputs, max_new_tokens, temperature=temperature, seed=repeat, **methods[name])
                for name in names[turn:] + names[:turn]
            }
            for name, r in measured.items():
                yield Record(
                    prompt=prompt.id,
                    category=prompt.category,
                    method=name,
                    repeat=repeat,
                    tokens=len(r.ids),
                    passes=r.passes,
                    committed=r.committed,
                    seconds=r.seconds,
                    prefill_seconds=r.prefill_seconds,
                    target_seconds=r.target_seconds,
                    draft_seconds=r.draft_seconds,
                    equal=None if temperature else r.ids == measured[PLAIN].ids,
                )


def summarise(records: list[Record]) -> list[Row]:
    """The benchmark's table: per category in order of appearance, then overall, a row per method."""
    methods = sorted({r.method for r in records}, key=lambda name: (name != PLAIN, name != LOOKUP, name))
    rows = []
    for category in [*dict.fromkeys(r.category for r in records), OVERALL]:
        chosen = [r for r in records if category in (r.category, OVERALL)]
        speeds = {m: _speeds(chosen, m) for m in methods}
        decoding = {m: _speeds(chosen, m, without_prefill=True) for m in methods}
        for method in methods:
            mine = [r for r in chosen if r.method == method]
            known = [r for r in mine if r.target_seconds is not None]
            forwards = sum(r.target_seconds + r.draft_seconds for r in known)
            rows.append(
                Row(
                    category=category,
                    method=method,
                    prompts=len({r.prompt for r in mine}),
                    tau=ratio(sum(r.committed for r in mine), sum(r.passes for r in mine)),
                    tokens_per_second=statistics.median(speeds[method]),
                    to_plain=_spread(speeds[method], speeds[PLAIN]),
                    to_lookup=_spread(speeds[method], speeds[LOOKUP]) if LOOKUP in speeds else None,
                    decoding_to_plain=_spread(decoding[method], decoding[PLAIN]),
                    equal=None
                    if any(r.equal is None for r in mine)
                    else len({r.prompt for r in mine} - {r.prompt for r in mine if not r.equal}),
                    outside=1 - forwards / sum(r.seconds for r in known) if known else None,
                    tau_interval=interval(mine),
                )
            )
    return rows


def interval(
    records: list[Record],
    over: list[Record] | None = None,
    value: Callable[[Record], tuple[float, float]] | None = None,
) -> tuple[float, float] | None:
    """95 % interval of pooled tau by resampling the prompts 2,000 times (percentile bootstrap), None for one prompt.

    over: records of another method on the same prompts; the interval is then of tau over that method's tau.
    value: record -> (numerator, denominator) of another pooled ratio than committed tokens per pass.
    """
    value = value or (lambda r: (r.committed, r.passes))
    prompts = sorted({r.prompt for r in records})
    if len(prompts) < 2:
        return None

    def by_prompt(some: list[Record]) -> torch.Tensor:
        sums = dict.fromkeys(prompts, (0.0, 0.0))
        for r in some:
            sums[r.prompt] = tuple(a + b for a, b in zip(sums[r.prompt], value(r)))
        return torch.tensor([sums[p] for p in prompts], dtype=torch.float64)  # [prompts, 2]

    draws = torch.randint(len(prompts), (2000, len(prompts)), generator=torch.Generator().manual_seed(0))
    ratios = [by_prompt(some)[draws].sum(1) for some in (records, over) if some is not None]
    ratios = [sums[:, 0] / sums[:, 1].clamp(min=1e-12) for sums in ratios]
    drawn = ratios[0] if over is None else ratios[0] / ratios[1]
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _speeds(records: list[Record], method: str, without_prefill: bool = False) -> list[float]:
    """Tokens per second of each repeat. The prefill's own tokens leave with its time."""
    repeats = sorted({r.repeat for r in records})
    chosen = [[r for r in records if r.method == method and r.repeat == i] for i in repeats]
    if without_prefill:
        return [
            ratio(sum(r.committed for r in group), sum(r.seconds - r.prefill_seconds for r in group))
            for group in chosen
        ]
    return [sum(r.tokens for r in group) / sum(r.seconds for r in group) for group in chosen]


def _spread(mine: list[float], others: list[float]) -> tuple[float, float, float]:
    ratios = [ratio(a, b) for a, b in zip(mine, others)]
    return statistics.median(ratios), min(ratios), max(ratios)


def plot(rows: list[Row], path: str | Path) -> None:
    """Draw tau and speed over plain by category, a bar per method, as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    categories = list(dict.fromkeys(r.category for r in rows))
    methods = list(dict.fromkeys(r.method for r in rows))
    width = 0.8 / len(methods)
    figure, panels = pyplot.subplots(2, 1, figsize=(2 + 1.3 * len(categories), 7), sharex=True, layout="constrained")
    for panel, value, label in (
        (panels[0], lambda r: r.tau, "tau (tokens per target pass)"),
        (panels[1], lambda r: r.decoding_to_plain[0], "speed over plain generate, prefill left out"),
    ):
        for index, method in enumerate(methods):
            bars = {r.category: value(r) for r in rows if r.method == method}
            places = [i + (index - (len(methods) - 1) / 2) * width for i in range(len(categories))]
            panel.bar(places, [bars[c] for c in categories], width, label=re.sub(r"[^+:]*/", "", method))
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.set_ylabel(label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    panels[1].set_xticks(range(len(categories)), categories, rotation=20)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def provenance(**settings: Any) -> dict[str, Any]:
    """What a result needs beside it: versions, the commit of this package, the machine, the settings as given."""
    # Here, so that the package may offer parts of this module at its front door.
    from .. import __version__

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "versions": {
            "hf_specdraft": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "accelerator": None if device is None else torch.get_device_module(device).get_device_name(),
        },
        "settings": settings,
    }


def sha256(path: str | Path) -> str:
    """Checksum of a file, to say which prompts were used."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _commit() -> str | None:
    """The commit this package runs from, "-dirty" when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def write_json(path: str | Path, rows: list[Row], records: list[Record], about: dict[str, Any]) -> None:
    """Save a benchmark: {"about", "rows", "records"}."""
    content = {"about": about, "rows": [asdict(r) for r in rows], "records": [asdict(r) for r in records]}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
