"""Model cards made of measured facts: what is not known is said to be so, never made up."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.utils import CONFIG_NAME

from ..inspection import OWN, Inspection, read_headers, recognise
from .provenance import Provenance
from .templates import described

README, BENCH = "README.md", "bench.json"
# Upstream's commands and ours overwrite a card with this line, and leave any other alone.
MARK = "<!-- Written by `hf-specdraft card`; remove this line to keep edits of your own. -->"
UNKNOWN = "not recorded"
# What a person may have put into a card's metadata, kept when the card is written anew.
_KEPT = ("license", "license_name", "license_link", "language", "datasets", "tags")
_TAGS = ["speculative-decoding", "hf_specdraft"]


def is_ours(folder: Path) -> bool:
    """Whether a folder's card may be overwritten: there is none, or this package wrote it."""
    return not (folder / README).exists() or MARK in (folder / README).read_text(encoding="utf-8")


def is_own_format(folder: Path) -> bool:
    """Whether the drafter in a folder is in this package's own format. Raises ValueError when it holds no drafter."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give the folder the drafter was saved to")
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        family, dialect = recognise(config)
    except (OSError, ValueError, AttributeError):
        family, dialect = None, None
    if family is None:
        raise ValueError(f"{folder} holds no drafter (its {CONFIG_NAME} names none); give the folder it was saved to")
    return dialect == OWN


def write(
    folder: str | Path, repo_id: str | None = None, license: str | None = None, tags: list[str] | None = None
) -> Path:
    """Write README.md from what a drafter's folder holds: config.json, weights, training.json and bench.json.

    repo_id: how the card's code names the drafter, by default the folder's own name. License and further tags that
    the card already has are kept.
    Raises ValueError when the folder holds no drafter of this package, or a card written by hand.
    """
    folder = Path(folder)
    if not is_own_format(folder):
        raise ValueError(f"{folder} is in another project's format; write the card of the drafter it was made from")
    if not is_ours(folder):
        raise ValueError(f"{folder / README} was written by hand; move it away, or put the line {MARK!r} into it")
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    made, measured = Provenance.load(folder) or Provenance(), measurements(folder)
    name = repo_id or folder.resolve().name
    free = recognise(config)[0].is_free
    kept = {}
    if (folder / README).exists():
        old = ModelCard.load(folder / README, ignore_metadata_errors=True).data.to_dict()
        kept = {key: old[key] for key in _KEPT if key in old}
    family = config["model_type"].removeprefix("specdraft_")
    kept["tags"] = list(dict.fromkeys([*_TAGS, family, *kept.get("tags", []), *(tags or [])]))
    if license is not None:
        kept["license"] = license
    target = config.get("target_name")
    anybody = "any target" if free else "a target that is not recorded"
    data = ModelCardData(
        library_name="hf_specdraft",
        pipeline_tag="text-generation",
        # The Hub takes names of its own only, not a folder of some machine.
        base_model=target if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", target or "") else None,
        model_name=name,
        eval_results=_eval_results(measured) if measured else None,
        **kept,
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name.rpartition('/')[2]}",
        MARK,
        f"Drafts for {f'`{target}`' if target else anybody} in transformers: `generate` "
        "returns what it would return without the drafter (sampling: tokens of the same law), in fewer target passes.",
        "## Use\n\n" + snippet(name, config),
        "## What it is\n\n" + _table(_description(free, folder, config)),
        "## Measured\n\n" + _measured(measured),
        "## How it was trained\n\n" + ("It has nothing to train." if free else _table(_training(made, config))),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(free, made, measured, config)),
    ]
    path = folder / README
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def snippet(name: str, config: dict) -> str:
    """Code that runs the drafter, as a Markdown block."""
    target = config.get("target_name") or "THE TARGET"
    revision = f', revision="{config["target_revision"]}"' if config.get("target_revision") else ""
    mode = "".join(f", {key}={value!r}" for key, value in (config.get("chat_template_kwargs") or {}).items())
    question = "Why is the sky blue?"
    if config.get("chat_template_sha256") == "":
        inputs = f'inputs = tokenizer("{question}", return_tensors="pt")'
    else:
        inputs = (
            f'messages = [{{"role": "user", "content": "{question}"}}]\n'
            "inputs = tokenizer.apply_chat_template(\n"
            f'    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{mode}\n'
            ")"
        )
    return f"""```python
import hf_specdraft
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto"{revision})
tokenizer = AutoTokenizer.from_pretrained("{target}"{revision})
drafter = hf_specdraft.AutoDrafter.from_pretrained("{name}", dtype="auto")

{inputs}
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128, return_dict_in_generate=True)
print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))
print("tokens per target pass:", output.speculation.tau)
```"""


def measure(folder: str | Path, bench_file: str | Path, methods: Sequence[str] = ()) -> None:
    """Keep what `hf-specdraft bench --json` measured of a drafter in its folder, for the card.

    methods: the benchmark's names for the drafter, alone first, then in company; by default the one that names this
        folder.
    Raises ValueError when the file is no benchmark or none of its methods is the drafter.
    """
    folder = Path(folder)
    is_own_format(folder)
    try:
        bench = json.loads(Path(bench_file).read_text(encoding="utf-8"))
        names = list(bench["about"]["settings"]["drafters"])
        rows = bench["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{bench_file} is no benchmark ({error!r}); make one with `hf-specdraft bench --json`"
        ) from None
    if not methods:
        mine = [name for name in names if Path(name.partition(":")[0]).resolve() == folder.resolve()]
        if len(mine) != 1:
            raise ValueError(
                f"{bench_file} measures {', '.join(names)}, of which {len(mine)} name {folder}; say which one it is "
                "with --method"
            )
        methods = mine
    unknown = sorted(set(methods) - set(names))
    if unknown:
        raise ValueError(f"{bench_file} measures {', '.join(names)}, but not {', '.join(unknown)}")
    # Without the folders of the machine that measured.
    labels = {method: re.sub(r"[^\s+:,=]*/", "", method) for method in methods}
    kept = {
        "about": bench["about"],
        "weights": weights_sha256(folder),
        "rows": [{**row, "method": labels[name]} for name in methods for row in rows if row["method"] == name],
    }
    (folder / BENCH).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def measurements(folder: Path) -> dict | None:
    """What `measure` kept, None when there is nothing or it was measured on other weights than these."""
    path = folder / BENCH
    if not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept if kept.get("weights") == weights_sha256(folder) else None


def weights_sha256(folder: Path) -> str:
    """Checksum of a folder's weight files."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _eval_results(measured: dict) -> list[EvalResult]:
    settings = measured["about"]["settings"]
    alone = [row for row in measured["rows"] if row["method"] == measured["rows"][0]["method"]]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=settings["prompts"],
            dataset_name=settings["prompts"],
            dataset_config=row["category"],
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 3),
        )
        for row in alone
        for kind, name, value in (
            ("tau", "tokens per target pass", row["tau"]),
            ("speedup", "speed over plain generate", row["to_plain"][0]),
        )
    ]


def _table(facts: dict[str, Any]) -> str:
    lines = ["| | |", "| --- | --- |"]
    return "\n".join(lines + [f"| {label} | {UNKNOWN if value is None else value} |" for label, value in facts.items()])


def _description(free: bool, folder: Path, config: dict) -> dict[str, Any]:
    headers = Inspection(str(folder))
    read_headers(headers, folder)
    floats = [dtype for dtype in headers.dtypes if "F" in dtype]
    layers, final = config.get("target_layer_ids"), " and the final state" if config.get("reads_final") else ""
    target, revision = config.get("target_name"), config.get("target_revision")
    return {
        "family": f"`{config['model_type']}`",
        "target": f"`{target}`, revision {revision or UNKNOWN}" if target else ("any" if free else None),
        "parameters": f"{headers.parameters:,}" + (f" ({', '.join(floats)})" if floats else ""),
        "tokens drafted a round": config.get("num_assistant_tokens"),
        **({"target layers read": f"{layers}{final}"} if layers else {}),
        **({"drafts from": f"{config['draft_vocab_size']:,} tokens"} if config.get("draft_vocab_size") else {}),
    }


def _measured(measured: dict | None) -> str:
    if measured is None:
        return "Tau and speed: not measured on these weights."
    about, settings = measured["about"], measured["about"]["settings"]
    lines = [
        f"Greedy, {settings['max_new_tokens']} new tokens at most, {settings['dtype']}, one row, prompts of "
        f"`{settings['prompts']}` (sha256 {settings['prompts_sha256'][:12]}), {settings['repeats']} run(s), on "
        f"{_machine(about['machine'])}; commit {about['commit'] or UNKNOWN}, {_versions(about['versions'])}. "
        "tau is the number of tokens committed per target pass; speeds are medians (lowest to highest run).",
        "",
        "| drafter | domain | prompts | tau | x plain generate | x prompt lookup | text equal to plain's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in measured["rows"]:
        speeds = [_spread(row[key]) for key in ("to_plain", "to_lookup")]
        cells = [f"`{row['method']}`", row["category"], row["prompts"], f"{row['tau']:.2f}", *speeds]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['equal']} of {row['prompts']} |")
    return "\n".join(lines)


def _spread(speed: list[float] | None) -> str:
    if speed is None:
        return "-"
    middle, low, high = speed
    return f"{middle:.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def _training(made: Provenance, config: dict) -> dict[str, Any]:
    facts = {
        "recipe": made.recipe,
        "command": f"`{made.command}`" if made.command else None,
        "commit": made.commit,
        "steps": made.steps,
        "wall-clock time": None if made.seconds is None else f"{made.seconds / 60:.1f} minutes",
        "hardware": _machine(made.hardware) if made.hardware else None,
        "versions": _versions(made.versions) if made.versions else None,
        "chat template": _template(config),
    }
    scalars = {key: value for key, value in made.data.items() if not isinstance(value, (dict, list))}
    nested = {key: json.dumps(value) for key, value in made.data.items() if isinstance(value, (dict, list))}
    return facts | ({f"data: {key}": value for key, value in (scalars | nested).items()} or {"data": None})


def _template(config: dict) -> str | None:
    sha256 = config.get("chat_template_sha256")
    return None if sha256 is None else described(sha256, config.get("chat_template_kwargs"))


def _limits(free: bool, made: Provenance, measured: dict | None, config: dict) -> list[str]:
    template = _template(config)
    if free:
        lines = ["It drafts only what the text, or a corpus it was given, already holds."]
    else:
        lines = [
            "Made for its target's weights: with a fine-tuned or other target the output is right, but drafts fail.",
            "The chat template and mode it was trained on are not recorded; acceptance depends on both."
            if template is None
            else f"Trained on {template}; under another template or mode fewer drafts are accepted.",
        ]
    if measured is None:
        lines.append("Acceptance and speed are not measured; `hf-specdraft bench` tells whether it pays on a machine.")
    else:
        slower = [f"{row['category']} (`{row['method']}`)" for row in measured["rows"] if row["to_plain"][0] < 1]
        lines.append(f"Slower than plain generate there: {', '.join(slower) or 'in no domain measured'}.")
        lines.append("Speed is a ratio on the machine named above; elsewhere it differs.")
    return lines + made.notes


def _machine(machine: dict) -> str:
    parts = [machine.get("accelerator"), machine.get("processor")]
    if machine.get("cores"):
        parts.append(f"{machine['cores']} cores, {machine.get('threads', '?')} threads used")
    return ", ".join(part for part in parts if part) or UNKNOWN


def _versions(versions: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN
