"""What each method adds to one block drafter: the same data, the same steps, all measured in one run.

    python scripts/ablation.py train   scripts/ablation.yaml --out build/ablation target=MODEL data=ANSWERS
    python scripts/ablation.py measure scripts/ablation.yaml --target MODEL --prompts FILE.jsonl
    python scripts/ablation.py report  scripts/ablation.yaml --out build/ablation

`train` makes the base drafter, then every variant from it. `measure` decodes greedily and at temperature 1, all methods
of a prompt in turn; `--part 1/2` takes every second prompt, so that two processes share the work. `report` writes
ablation.md (tables and signs) and ablation.png. Each does what is missing and leaves what is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hf_specdraft import AutoDrafter, evaluation
from hf_specdraft.confidence import calibrate
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.evaluation import PLAIN, Record, interval
from hf_specdraft.evaluation.benchmark import OVERALL, ratio
from hf_specdraft.evaluation.edits import edit_statistics
from hf_specdraft.policies import speckv
from hf_specdraft.training.data import collate, load
from hf_specdraft.training.features import LiveFeatures
from hf_specdraft.training.records import TrainingBatch

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
Config = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Variants, methods and signs.")]
Out = Annotated[Path, typer.Option(file_okay=False, help="Where drafters and measurements are kept.")]


@app.command()
def train(
    config: Config,
    out: Out,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value over every run's, such as target=MODEL.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only these variants (or `base`).")] = None,
) -> None:
    """Train the base and the variants, each by `hf-specdraft train`."""
    plan = yaml.safe_load(config.read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    runs = {"base": plan["base"], **{name: _variant(plan, v, out) for name, v in plan["variants"].items()}}
    for name, settings in runs.items():
        folder = out / name
        if (only and name not in only) or (folder / "model.safetensors").exists():
            continue
        settings["trainer"] = {**settings["trainer"], "output_dir": str(folder)}
        file = out / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "hf_specdraft.cli", "train", str(file), *(overrides or [])], check=True)


def _variant(plan: dict[str, Any], variant: dict[str, Any], out: Path) -> dict[str, Any]:
    """A variant's whole config: the base's, the settings all variants share, its own; from the base's weights."""
    merged = dict(plan["base"])
    for name in ("start_texts", "draft_vocab"):
        merged.pop(name, None)  # of a new drafter
    merged["drafter"] = {"init_from": str(out / "base")}
    for settings in (plan["every_variant"], variant):
        for section, values in settings.items():
            both = isinstance(values, dict) and isinstance(merged.get(section), dict) and section != "loss"
            merged[section] = {**merged[section], **values} if both else values
    return merged


@app.command()
def fit(
    config: Config,
    out: Out,
    target: Annotated[str, typer.Option(help="The model to speed up.")],
    prompts: Annotated[Path, typer.Option(exists=True, help="Training prompts, as JSON lines.")],
    data: Annotated[str, typer.Option(help="The folder of answers, whose held-out texts edits are counted on.")],
    count: Annotated[int, typer.Option(min=1, help="How many prompts are decoded.")] = 12,
) -> None:
    """Fit what reads decoded rounds (the confidence head's temperatures, SpecKV's controller), and count edits."""
    model, tokenizer = evaluation.load_target(target, "float32", pack=True)
    # Training prompts have no category and one turn.
    lines = prompts.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:: max(1, len(lines) // count)]][:count]
    inputs = [evaluation.encode(tokenizer, text) for text in texts]
    heads = AutoDrafter.from_pretrained(out / "heads")
    print("temperatures", calibrate(model, heads, [i["input_ids"][0] for i in inputs], max_new_tokens=48))
    heads.save_pretrained(out / "heads")
    plain = AutoDrafter.from_pretrained(out / "plain")
    records = speckv.collect(model, plain, inputs, (2, 4, 6), max_new_tokens=48, do_sample=False)
    options = {"lengths": [1, 2, 4, 6], "controller": speckv.fit(records).to_dict()}
    plain.config.policy = {"name": "speckv", **options}
    plain.save_pretrained(out / "speckv")
    _, held_out, _ = load(data)
    counted = {}
    for name in ("plain", "edit", "edit-all-draft"):
        drafter = AutoDrafter.from_pretrained(out / name, edit_passes=1)
        live = LiveFeatures(model, drafter.feature_layers)
        batches = (live(TrainingBatch(**_row(held_out[i]))) for i in range(len(held_out)))
        counted[name] = asdict(edit_statistics(drafter, TargetView(model), batches))
    (out / "edits.json").write_text(json.dumps(counted, indent=1) + "\n", encoding="utf-8")


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in collate([row], 0).items() if key != "index"}


@app.command()
def measure(
    config: Config,
    out: Out,
    target: Annotated[str, typer.Option(help="The model to speed up.")],
    prompts: Annotated[list[Path], typer.Option(exists=True, help="JSON lines with id, category, turns.")],
    per_category: Annotated[int, typer.Option(min=1)] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    temperature: Annotated[list[float], typer.Option(min=0)] = (0.0, 1.0),
    only: Annotated[list[str] | None, typer.Option(help="Only these methods, beside plain generate.")] = None,
    part: Annotated[str, typer.Option(help="i/n: this process's share of the prompts.")] = "1/1",
) -> None:
    """Decode every prompt with every method."""
    plan = yaml.safe_load(config.read_text(encoding="utf-8"))
    index, parts = map(int, part.split("/"))
    model, tokenizer = evaluation.load_target(target, "float32", pack=True)
    chosen = [p for file in prompts for p in evaluation.read_prompts(file, per_category)][index - 1 :: parts]
    methods = evaluation.baselines(0)
    for name, spec in plan["methods"].items():
        if only and name not in only:
            continue
        drafter = evaluation.load_drafter(
            spec.replace("OUT", str(out)), plan.get("drafter_dtype", "float32"), pack=True
        )
        methods[name] = {"assistant_model": drafter}
    for heat in temperature:
        measured = evaluation.bench(model, tokenizer, chosen, methods, max_new_tokens, repeats, temperature=heat)
        with (out / f"records-T{heat:g}-{index}.jsonl").open("w", encoding="utf-8") as lines:
            for record in measured:
                lines.write(json.dumps(asdict(record)) + "\n")
                lines.flush()
        about = evaluation.provenance(
            target=Path(target).name,
            prompts={file.name: evaluation.sha256(file) for file in prompts},
            per_category=per_category,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            temperature=heat,
            processes=parts,
            methods={name: plan["methods"][name] for name in methods if name in plan["methods"]},
        )
        (out / f"about-T{heat:g}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


@app.command()
def report(config: Config, out: Out) -> None:
    """Tables and signs as Markdown, tau and speed as a plot, all records in one JSON."""
    plan = yaml.safe_load(config.read_text(encoding="utf-8"))
    about = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("about-T*.json"))}
    found: dict[str, list[Record]] = {}
    for file in sorted(out.glob("records-T*.jsonl")):
        heat = file.name.split("-")[1].removeprefix("T")
        found.setdefault(heat, []).extend(Record(**json.loads(line)) for line in file.read_text("utf-8").splitlines())
    lines = []
    for heat, records in found.items():
        lines += [f"\n### {'Greedy' if heat == '0' else f'Temperature {heat}'}\n", *_table(records)]
    lines += [
        "\n### Signs\n",
        "| claim | compared | T | tau ratio (95 %) | speed ratio (95 %) | verdict |",
        "| --- " * 6 + "|",
    ]
    for sign in plan["signs"]:
        for heat, records in found.items():
            if {sign["better"], sign["worse"]} <= {r.method for r in records}:
                lines.append(_sign(sign, heat, records))
    (out / "ablation.md").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")
    content = {"about": about, "records": {heat: [asdict(r) for r in records] for heat, records in found.items()}}
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


def _sign(sign: dict[str, str], heat: str, records: list[Record]) -> str:
    """One claim: that `better` is above `worse`, by tau and by decoding speed."""
    better, worse = ([r for r in records if r.method == sign[side]] for side in ("better", "worse"))
    tau = ratio(*(_pooled(side, lambda r: (r.committed, r.passes)) for side in (better, worse)))
    spread = interval(better, worse)

    def decoding(r: Record) -> tuple[float, float]:
        return r.committed, r.seconds - r.prefill_seconds

    speed = ratio(_pooled(better, decoding), _pooled(worse, decoding))
    around = interval(better, worse, decoding)
    verdict = "yes" if spread[0] > 1 else "no" if spread[1] < 1 else "open"
    cells = f"{tau:.3f} ({spread[0]:.3f}-{spread[1]:.3f}) | {speed:.2f} ({around[0]:.2f}-{around[1]:.2f}) | {verdict}"
    return f"| {sign['says']} | {sign['better']} / {sign['worse']} | {heat} | {cells} |"


def _pooled(records: list[Record], value: Any) -> float:
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
    app()
