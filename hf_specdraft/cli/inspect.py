"""hf-specdraft inspect: what a drafter checkpoint is."""

from __future__ import annotations

from typing import Annotated

import typer
from transformers import AutoTokenizer

from ..inspection import inspect_checkpoint
from .options import TemplateKwargs


def inspect(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder or Hub name.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="A target's folder or Hub name, to compare its chat template.")
    ] = None,
    chat_template_kwargs: TemplateKwargs = "{}",
) -> None:
    """Say what a drafter checkpoint is and what is wrong with it. Exit status 1 when there are problems."""
    compared = None if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    found = inspect_checkpoint(drafter, compared, chat_template_kwargs)
    sizes = ", ".join(f"{dtype} {count:,}" for dtype, count in found.dtypes.items())
    facts = {
        "family": found.family,
        "dialect": found.dialect,
        "architectures": ", ".join(found.architectures) or None,
        "target": found.target,
        "target revision": found.target_revision,
        "trained on": found.trained_on,
        "vocabulary": found.vocab_size,
        "target hidden size": found.target_hidden_size,
        "target layers": found.target_depth,
        "layers tapped": found.layers,
        "parameters": f"{found.parameters:,}" + (f" ({sizes})" if sizes else ""),
        "loads": "yes" if found.loads else "no",
    }
    print(found.name)
    for label, value in facts.items():
        print(f"  {label + ':':<20}{'not said' if value is None else value}")
    for label, lines in (("problem", found.problems), ("warning", found.warnings), ("note", found.notes)):
        for line in lines:
            print(f"  {label + ':':<20}{' '.join(line.split())}")
    raise typer.Exit(1 if found.problems else 0)
