"""hf-specdraft export: a drafter in another project's format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import evaluation, publishing
from .options import SPEC, Dtype, DtypeOption


def export(
    drafter: Annotated[str, typer.Argument(help=SPEC)],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(publishing.export_dialects())}.")],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    target: Annotated[str | None, typer.Option(help="For formats that store what the drafter borrows of it.")] = None,
    dtype: DtypeOption = Dtype.auto,
) -> None:
    """Write a drafter for another project's engine, and read it back to see that it is the same drafter."""
    loaded = evaluation.load_drafter(drafter, dtype.value)
    # In the drafter's dtype: what is copied from the target becomes part of the drafter.
    model = None if target is None else evaluation.load_target(target, str(loaded.dtype).removeprefix("torch."))[0]
    lost = publishing.export(loaded, format, out, model)
    print(out)
    if lost:
        print(f"not carried by the format: {', '.join(lost)}", file=sys.stderr)
