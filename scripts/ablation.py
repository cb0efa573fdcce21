"""What each method adds to one block drafter: the same data, the same steps, all measured in one run.

    python scripts/ablation.py train   scripts/ablation.yaml --out build/ablation target=MODEL data=ANSWERS
    python scripts/ablation.py measure scripts/ablation.yaml --target MODEL --prompts FILE.jsonl
    python scripts/ablation.py replay  scripts/ablation.yaml --target MODEL --prompts FILE.jsonl
    python scripts/ablation_report.py  scripts/ablation.yaml --out build/ablation

`train` makes the base drafter, then every variant from it. `measure` decodes greedily and at temperature 1, all methods
of a prompt in turn; `--part 1/2` takes every second prompt, so that two processes share the work. `replay` counts tau
of chains on many more texts, by reading what the target wrote. `ablation_report.py` writes ablation.md (tables and
signs) and ablation.png. Each does what is missing and leaves what is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml

from hf_specdraft import AutoDrafter, evaluation
from hf_specdraft.confidence import calibrate
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.evaluation.edits import edit_statistics
from hf_specdraft.policies import speckv
from hf_specdraft.training.data import collate, load
from hf_specdraft.training.features import LiveFeatures
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.training.simulation import simulate

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
Config = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Variants, methods and signs.")]
Out = Annotated[Path, typer.Option(file_okay=False, help="Where drafters and measurements are kept.")]
Target = Annotated[str, typer.Option(help="The model to speed up.")]
Prompts = Annotated[list[Path], typer.Option(exists=True, help="JSON lines with id, category, turns.")]


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
    merged["drafter"] = {"init_from": "OUT/base"}
    for settings in (plan["every_variant"], variant):
        for section, values in settings.items():
            both = isinstance(values, dict) and isinstance(merged.get(section), dict) and section != "loss"
            merged[section] = {**merged[section], **values} if both else values
    merged["drafter"]["init_from"] = merged["drafter"]["init_from"].replace("OUT", str(out))
    return merged


@app.command()
def fit(
    config: Config,
    out: Out,
    target: Target,
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
    target: Target,
    prompts: Prompts,
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
        named = {name: plan["methods"][name] for name in methods if name in plan["methods"]}
        counts = dict(per_category=per_category, max_new_tokens=max_new_tokens, repeats=repeats)
        _about(
            out / f"about-T{heat:g}.json", target, prompts, **counts, temperature=heat, processes=parts, methods=named
        )


@app.command()
def replay(
    config: Config,
    out: Out,
    target: Target,
    prompts: Prompts,
    per_category: Annotated[int, typer.Option(min=1)] = 10,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 80,
    only: Annotated[list[str] | None, typer.Option(help="Only these methods.")] = None,
    name: Annotated[str, typer.Option(help="Of these prompts, in the report.")] = "benchmarks",
) -> None:
    """tau of greedy decoding, read off the target's own greedy texts: what a chain of full length commits hangs on the
    text before it only."""
    plan = yaml.safe_load(config.read_text(encoding="utf-8"))
    file = out / f"replay-{name}.jsonl"
    done = {(r.prompt, r.method) for r in replayed(file)}
    chosen = [p for f in prompts for p in evaluation.read_prompts(f, per_category)]
    specs = {m: plan["methods"][m] for m in only or plan["replayed"] if {(p.id, m) for p in chosen} - done}
    if not specs:
        return
    drafters = {method: evaluation.load_drafter(spec.replace("OUT", str(out))) for method, spec in specs.items()}
    model, tokenizer = evaluation.load_target(target, "float32", pack=True)
    view, loss = TargetView(model), DraftLoss("ce")
    (layers,) = {drafter.feature_layers for drafter in drafters.values()}
    live = LiveFeatures(model, layers, law=False)
    with file.open("a", encoding="utf-8") as lines, torch.no_grad():
        for prompt in chosen:
            missing = {method: d for method, d in drafters.items() if (prompt.id, method) not in done}
            if not missing:
                continue
            asked = evaluation.encode(tokenizer, prompt.text)
            ids = model.generate(**asked, do_sample=False, max_new_tokens=max_new_tokens)[0]
            written = torch.arange(len(ids)) >= asked["input_ids"].shape[1]
            row = {"input_ids": ids, "document_ids": torch.ones_like(ids), "loss_mask": written}
            batch = live(TrainingBatch(**_row(row)))
            for method, drafter in missing.items():
                read = loss(drafter, view, batch, anchors=None)
                committed, passes = simulate(read["matches"], read["anchors"], batch)
                record = Replayed(prompt.id, prompt.category, method, committed, passes)
                lines.write(json.dumps(asdict(record)) + "\n")
                lines.flush()
    counts = dict(per_category=per_category, max_new_tokens=max_new_tokens)
    _about(out / f"about-replay-{name}.json", target, prompts, **counts)


def _about(file: Path, target: str, prompts: list[Path], **settings: Any) -> None:
    """Write what a measurement was of."""
    sums = {path.name: evaluation.sha256(path) for path in prompts}
    about = evaluation.provenance(target=Path(target).name, prompts=sums, **settings)
    file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


@dataclass
class Replayed:
    """One text of `replay` and a method: what decoding it would commit, in how many passes."""

    prompt: str
    category: str
    method: str
    committed: int
    passes: int


def replayed(file: Path) -> list[Replayed]:
    """What `replay` has written there, nothing where it did not run."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Replayed(**json.loads(line)) for line in lines]


if __name__ == "__main__":
    app()
