"""hf-specdraft vocabulary: which tokens a drafter's own head should have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import evaluation
from .options import Device, Dtype, DtypeOption, Target


class Utility(str, Enum):
    speed = "speed"
    linear = "linear"


def vocabulary(
    target: Target,
    answers: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The target's answers: a folder of `hf-specdraft data`.")
    ],
    output: Annotated[Path, typer.Option(help="The file to write; a training config names it as draft_vocab.")],
    size: Annotated[int | None, typer.Option(min=1, help="Keep this many tokens instead of searching.")] = None,
    coverage: Annotated[float, typer.Option(min=0, max=1, help="Least share of the answers' tokens to keep.")] = 0.98,
    utility: Annotated[
        Utility, typer.Option(help="What the search maximises: tokens per second, or coverage minus head time.")
    ] = Utility.speed,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="speed: the chance that a draft token is accepted, all tokens kept.")
    ] = 0.7,
    depth: Annotated[int, typer.Option(min=1, help="Tokens drafted a round.")] = 7,
    sequential: Annotated[
        bool, typer.Option(help="One pass of the head per token (EAGLE), not one per draft.")
    ] = False,
    layers_ms: Annotated[
        float, typer.Option("--layers-ms", min=0, help="speed: milliseconds a round spends in the drafter's layers.")
    ] = 0.0,
    weight: Annotated[float, typer.Option(min=0, max=1, help="linear: weight of coverage.")] = 0.5,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of a low-rank head.")] = None,
    dtype: DtypeOption = Dtype.float32,
    device: Device = "cpu",
) -> None:
    """Choose a drafter's vocabulary: the tokens the target writes most, as many as pay on this machine."""
    from ..training import vocabulary as v
    from ..training.data import load

    data, _, _ = load(answers)
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
    model, tokenizer = evaluation.load_target(target, dtype.value, device)
    text = model.config.get_text_config()
    whole = text.vocab_size
    if len(data) < 2:
        raise ValueError(f"{answers} holds {len(data)} rows; coverage is measured between two halves of the answers")
    halves = [v.count_answers(data.shard(2, half, contiguous=False), whole) for half in (0, 1)]
    counts = halves[0] + halves[1]
    always = [token for token in v.control_tokens(tokenizer, model.generation_config) if token < whole]
    covered, unseen = v.coverage(counts, always), v.unseen_coverage(*halves, always)
    least = v.smallest_size(covered, coverage, len(always))

    sizes = sorted({*(1 << n for n in range(10, whole.bit_length())), least, size or whole, whole})
    measured = v.measure_head(text.hidden_size, sizes, 1 if sequential else depth, rank, model.dtype, model.device)
    calls = depth if sequential else 1
    rest = v.measure_target(model, depth + 1) + layers_ms / 1000

    def utility_of(rows: int) -> float:
        share, head = float(unseen[rows - 1]), calls * measured(rows)
        if utility is Utility.linear:
            return v.linear(share, head, calls * measured(whole), weight)
        return v.speed(share, head, acceptance, depth, rest)

    chosen = v.Vocabulary.largest(counts, size or v.choose_size(utility_of, least, whole), always)
    view = Table("tokens", "coverage", "of unseen answers", "head ms", utility.value)
    for rows in sorted({*sizes, len(chosen.ids)}):
        mark = "[bold]" if rows == len(chosen.ids) else ""
        shares = f"{covered[rows - 1]:.4f}", f"{unseen[rows - 1]:.4f}"
        cells = f"{rows}", *shares, f"{calls * measured(rows) * 1e3:.3f}", f"{utility_of(rows):.3f}"
        view.add_row(*(mark + cell for cell in cells))
    console = Console()
    console.print(view)
    chosen.save(output, target=target, answers=answers.name, coverage=f"{chosen.coverage:.6f}")
    console.print(
        f"{len(chosen.ids)} of {whole} tokens, {chosen.coverage:.2%} of {int(counts.sum())} counted, "
        f"{len(always)} kept always; written to {output}",
        soft_wrap=True,
    )
