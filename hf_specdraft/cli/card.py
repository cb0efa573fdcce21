"""hf-specdraft card: a drafter's model card, and its way to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import publishing


def card(
    folder: Annotated[Path, typer.Argument(help="The folder a drafter was saved to.")],
    bench: Annotated[
        Path | None, typer.Option(help="What `hf-specdraft bench --json` wrote about this drafter.")
    ] = None,
    method: Annotated[
        list[str], typer.Option(help="For --bench: its name for this drafter, if not FOLDER; then others to show.")
    ] = (),
    license: Annotated[str | None, typer.Option(help="An identifier of the Hub's, such as apache-2.0.")] = None,
    push: Annotated[str | None, typer.Option(metavar="REPO", help="Upload to this Hub repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="For --push: a branch, made if there is none.")] = None,
    private: Annotated[bool, typer.Option(help="For --push: make a new repository private.")] = False,
) -> None:
    """Write a drafter's model card from the facts in its folder, and upload the folder if asked."""
    if bench is not None:
        publishing.measure(folder, bench, method)
    if push is None or publishing.cards.is_ours(folder):
        print(publishing.write_card(folder, repo_id=push, license=license))
    if push is not None:
        print(publishing.push(folder, push, revision=revision, private=private or None))
