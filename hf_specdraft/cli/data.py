"""hf-specdraft data: prompts to training data, the answers written by the target itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoConfig, AutoTokenizer

from .. import evaluation
from ..training import answers as writing
from ..training.data import Evaluation, prepare
from .options import Device, Dtype, DtypeOption, MaxNewTokens


def data(
    target: Annotated[str, typer.Option(help="The model to speed up: a folder or Hub name.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="The data folder; answers are kept in it as they finish.")],
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, help="JSON lines or a datasets folder with `prompt`, `turns` or `messages`."),
    ] = None,
    synthesise: Annotated[int, typer.Option(min=0, help="So many prompts the target makes up itself.")] = 0,
    answers: Annotated[
        Path | None, typer.Option(exists=True, help="Answers there are already, or chats; none are written then.")
    ] = None,
    temperature: Annotated[
        list[float], typer.Option(help="Of the answers; 0 is greedy. Several times: each for an equal share.")
    ] = (0.0, 0.8),
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of the sampled answers.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    server: Annotated[str | None, typer.Option(help="Base URL of an OpenAI-compatible server of the target.")] = None,
    model: Annotated[str | None, typer.Option(help="The target's name on the server; by default as --target.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to the server at a time.")] = 32,
    extra: Annotated[str, typer.Option(help='JSON for the requests, for vLLM {"return_token_ids": true}.')] = "{}",
    mode: Annotated[
        list[str], typer.Option(help="Argument of the chat template, such as enable_thinking=false. Several times.")
    ] = (),
    dedupe: Annotated[
        Path | None, typer.Option(exists=True, help="Evaluation prompts; the same and near ones are left out.")
    ] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens a row at most; longer chats become windows.")] = 2048,
    pack: Annotated[int | None, typer.Option(min=8, help="Pack chats into rows of so many tokens.")] = None,
    held_out: Annotated[float, typer.Option(min=0, max=1, help="Share of the prompts held out of training.")] = 0.02,
    max_new_tokens: MaxNewTokens = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers written at a time here.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the sampled answers.")] = 0,
    dtype: DtypeOption = Dtype.auto,
    device: Device = "cpu",
) -> None:
    """Let the target answer prompts and make training data of it. Stopped, the same command continues."""
    _refuse_missing(["datasets"] + ["openai"] * (server is not None))
    if (answers is None) == (prompts is None and not synthesise):
        raise ValueError("give either --answers, or prompts to answer: --prompts, --synthesise or both")
    import datasets

    datasets.disable_progress_bars()
    chat = dict(_argument(item) for item in mode)
    try:
        fields = json.loads(extra)
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra {extra}: not JSON ({error})") from error
    about: dict[str, Any] = {
        "target": target,
        "revision": getattr(AutoConfig.from_pretrained(target), "_commit_hash", None),
        "prompts": None if prompts is None else prompts.name,
        "prompts_sha256": evaluation.sha256(prompts) if prompts is not None and prompts.is_file() else None,
    }
    tokenizer = AutoTokenizer.from_pretrained(target)
    console = Console(stderr=True)
    if answers is None:
        law = dict(max_new_tokens=max_new_tokens, top_p=top_p, mode=chat, seed=seed)
        local = remote = None
        if server is None or synthesise:
            loaded, _ = evaluation.load_target(target, dtype.value, device)
            local = writing.LocalWriter(loaded, tokenizer, batch_size, **law)
        if server is not None:
            remote = writing.ServerWriter(server, model or target, concurrency=concurrency, extra=fields, **law)
        answers = out / "answers.jsonl"
        try:
            asked = [] if prompts is None else writing.read_prompts(prompts)
            if synthesise:
                made = writing.AnswerFile(out / "synthesised.jsonl", {"target": target, **local.settings()})
                new = local.synthesise(synthesise, made)
                _run(new, synthesise, len(made.rows), "prompts", console)
                asked += writing.read_prompts(made.path)
            if dedupe is not None:
                known = Evaluation(dedupe)
                kept = [prompt for prompt in asked if not known.knows(prompt.text)]
                about["prompts_known_from_evaluation"] = len(asked) - len(kept)
                asked = kept
            jobs = writing.plan(asked, dict.fromkeys(temperature, 1.0), samples)
            writer = remote or local
            asked_for = {"target": target, "temperature": list(temperature), "samples": samples}
            file = writing.AnswerFile(answers, {**asked_for, **writer.settings()})
            _run(writer.write(jobs, file), len(jobs), len(file.rows), "answers", console)
        except KeyboardInterrupt:
            console.print(f"stopped; what was finished is in {out}, and the same command continues behind it")
            raise typer.Exit(130) from None
    about["answers_sha256"] = evaluation.sha256(answers) if answers.is_file() else None
    facts = prepare(
        answers,
        tokenizer,
        out,
        length=pack or length,
        pack=pack is not None,
        held_out=held_out,
        dedupe=dedupe,
        mode=chat,
        about=about,
    )
    for name, counts in facts["splits"].items():
        print(f"{name}: " + ", ".join(f"{number:,} {what.replace('_', ' ')}" for what, number in counts.items()))
    for reason, number in facts["dropped"].items():
        print(f"dropped: {number:,} {reason}")
    print(f"data in {out}")


def _run(rows: Any, total: int, done: int, what: str, console: Console) -> None:
    """Let the rows be written, with a bar."""
    for _ in track(rows, total=max(total - done, 0), description=what, console=console, transient=True):
        pass


def _argument(item: str) -> tuple[str, Any]:
    if "=" not in item:
        raise ValueError(f"--mode {item}: expected name=value")
    return evaluation.key_value(item)


def _refuse_missing(modules: list[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"hf-specdraft data needs {', '.join(missing)}: pip install 'hf_specdraft[train]'")
