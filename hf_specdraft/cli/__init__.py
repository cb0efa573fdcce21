"""The `hf-specdraft` command: one file per subcommand, each doing nothing but parse, call, print."""

from __future__ import annotations

import sys

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(f"hf-specdraft needs {error.name}: pip install 'hf_specdraft[cli]'") from None

from transformers.utils import logging

from .bench import bench
from .capture import capture
from .card import card
from .check import check
from .data import data
from .export import export
from .floors import floors
from .generate import generate
from .inspect import inspect
from .recipes import recipes
from .train import train
from .vocabulary import vocabulary

app = typer.Typer(
    help="Speculative decoding for transformers: run, check, measure, inspect, train, describe and export drafters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, check, bench, floors, inspect, data, capture, train, recipes, card, export, vocabulary):
    app.command()(command)


def main() -> None:
    """Run the command line. What a user can mend ends in one line on stderr and exit status 1."""
    logging.disable_progress_bar()
    try:
        app()
    except (ValueError, OSError) as error:
        print("hf-specdraft: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
