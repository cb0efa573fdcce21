"""What `ablation.py` measured: tables and signs as Markdown, tau and speed as a plot, all records in one JSON.

python scripts/ablation_report.py scripts/ablation.yaml --out build/ablation
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
import yaml
from ablation import Config, Out, Replayed, replayed

from hf_specdraft import evaluation
from hf_specdraft.evaluation import PLAIN, Record, interval
from hf_specdraft.evaluation.benchmark import OVERALL, ratio


def report(config: Config, out: Out) -> None:
    """Tables and signs as Markdown, tau and speed as a plot, all records in one JSON."""
    plan = yaml.safe_load(config.read_text(encoding="utf-8"))
    about = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("about-*.json"))}
    found: dict[str, list[Record]] = {}
    for file in sorted(out.glob("records-T*.jsonl")):
        heat = file.name.split("-")[1].removeprefix("T")
        found.setdefault(heat, []).extend(Record(**json.loads(line)) for line in file.read_text("utf-8").splitlines())
    texts = {file.stem.removeprefix("replay-"): replayed(file) for file in sorted(out.glob("replay-*.jsonl"))}
    measured = {f"T={heat}": records for heat, records in found.items()}
    measured |= {f"texts: {name}": records for name, records in texts.items()}
    lines = []
    for heat, records in found.items():
        lines += [f"\n### {'Greedy' if heat == '0' else f'Temperature {heat}'}\n", *_table(records)]
    for name, records in texts.items():
        lines += [f"\n### Greedy, by reading the target's texts: {name}\n", *_replay_table(records)]
    lines += [
        "\n### Signs\n",
        "| claim | compared | on | tau ratio (95 %) | speed ratio (95 %) | verdict |",
        "| --- " * 6 + "|",
    ]
    for sign in plan["signs"]:
        for where, records in measured.items():
            if {sign["better"], sign["worse"]} <= {r.method for r in records}:
                lines.append(_sign(sign, where, records))
    (out / "ablation.md").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")
    content = {"about": about, "records": {where: [asdict(r) for r in records] for where, records in measured.items()}}
    (out / "ablation.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    _plot(found, out / "ablation.png")


def _table(records: list[Record]) -> list[str]:
    rows = evaluation.summarise(records)
    categories = [c for c in dict.fromkeys(r.category for r in rows) if c != OVERALL]
    lines = [
        "| method | tau (95 %) | decoding x plain (repeats) | equal | "
        + " | ".join(f"tau: {c}" for c in categories)
        + " |",
        "| --- " * (4 + len(categories)) + "|",
    ]
    by = {(r.method, r.category): r for r in rows}
    for method in dict.fromkeys(r.method for r in rows):
        row = by[method, OVERALL]
        middle, low, high = row.decoding_to_plain
        equal = "-" if row.equal is None else f"{row.equal}/{row.prompts}"
        tau = f"{row.tau:.2f}" + ("" if row.tau_interval is None else " ({:.2f}-{:.2f})".format(*row.tau_interval))
        cells = " | ".join(f"{by[method, c].tau:.2f}" for c in categories)
        lines.append(f"| {method} | {tau} | {middle:.2f} ({low:.2f}-{high:.2f}) | {equal} | {cells} |")
    return lines


def _replay_table(texts: list[Replayed]) -> list[str]:
    categories, methods = (list(dict.fromkeys(getattr(r, field) for r in texts)) for field in ("category", "method"))
    lines = [
        "| method | tau (95 %) | " + " | ".join(f"tau: {c}" for c in categories) + " |",
        "| --- " * (2 + len(categories)) + "|",
    ]
    for method in methods:
        records = [r for r in texts if r.method == method]
        low, high = interval(records)
        cells = [f"{_pooled([r for r in records if r.category == c], _tau):.2f}" for c in categories]
        lines.append(f"| {method} | {_pooled(records, _tau):.3f} ({low:.3f}-{high:.3f}) | {' | '.join(cells)} |")
    return lines


def _sign(sign: dict[str, str], where: str, records: list[Record] | list[Replayed]) -> str:
    """One claim: that `better` is above `worse`, by tau or, where the sign says so, by decoding speed."""
    better, worse = ([r for r in records if r.method == sign[side]] for side in ("better", "worse"))
    spread = deciding = interval(better, worse)
    cells = f"{_pooled(better, _tau) / _pooled(worse, _tau):.3f} ({spread[0]:.3f}-{spread[1]:.3f})"
    if isinstance(records[0], Record):
        around = interval(better, worse, _decoding)
        speed = _pooled(better, _decoding) / _pooled(worse, _decoding)
        cells += f" | {speed:.2f} ({around[0]:.2f}-{around[1]:.2f})"
        deciding = around if sign.get("by") == "speed" else spread
    else:
        cells += " | -"
    verdict = "yes" if deciding[0] > 1 else "no" if deciding[1] < 1 else "open"
    return f"| {sign['says']} | {sign['better']} / {sign['worse']} | {where} | {cells} | {verdict} |"


def _tau(r: Record | Replayed) -> tuple[int, int]:
    return r.committed, r.passes


def _decoding(r: Record) -> tuple[float, float]:
    return r.committed, r.seconds - r.prefill_seconds


def _pooled(records: list, value: Any) -> float:
    pairs = [value(r) for r in records]
    return ratio(sum(a for a, _ in pairs), sum(b for _, b in pairs))


def _plot(found: dict[str, list[Record]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = evaluation.summarise(next(iter(found.values())))
    methods = [m for m in dict.fromkeys(r.method for r in first) if m != PLAIN]
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 1.5 + 0.28 * len(methods)), sharey=True, layout="constrained")
    for shift, (heat, records) in enumerate(found.items()):
        rows = {r.method: r for r in evaluation.summarise(records) if r.category == OVERALL}
        there = [m for m in methods if m in rows]
        places = [methods.index(m) + 0.2 * (2 * shift - len(found) + 1) for m in there]
        taus = [rows[m].tau for m in there]
        limits = [rows[m].tau_interval or (rows[m].tau, rows[m].tau) for m in there]
        spread = [[abs(tau - ends[side]) for tau, ends in zip(taus, limits)] for side in (0, 1)]
        label = "greedy" if heat == "0" else f"T={heat}"
        panels[0].errorbar(taus, places, xerr=spread, fmt="o", markersize=4, label=label)
        speeds = [rows[m].decoding_to_plain for m in there]
        around = [[abs(s[0] - s[side]) for s in speeds] for side in (1, 2)]
        panels[1].errorbar([s[0] for s in speeds], places, xerr=around, fmt="o", markersize=4)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].invert_yaxis()
    panels[0].set_xlabel("tau, 95 % over prompts")
    panels[1].set_xlabel("decoding speed over plain, range of repeats")
    for panel in panels:
        panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.grid(axis="x", alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(report)
