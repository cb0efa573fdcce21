"""hf-specdraft inspect: what a drafter checkpoint is."""

from __future__ import annotations

from typing import Annotated

import typer

from ..inspection import inspect_checkpoint


def inspect(drafter: Annotated[str, typer.Argument(help="A drafter's folder or Hub name.")]) -> None:
    """Say what a drafter checkpoint is and what is wrong with it. Exit status 1 when there are problems."""
    found = inspect_checkpoint(drafter)
    sizes = ", ".join(f"{dtype} {count:,}" for dtype, count in found.dtypes.items())
    facts = {
        "family": found.family,
        "dialect": found.dialect,
        "architectures": ", ".join(found.architectures) or None,
        "target": found.target,
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
    for label, lines in (("problem", found.problems), ("note", found.notes)):
        for line in lines:
            print(f"  {label + ':':<20}{' '.join(line.split())}")
    raise typer.Exit(1 if found.problems else 0)
