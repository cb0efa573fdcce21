"""Options that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..drafters import Drafter
from ..publishing import template_mismatch


class Dtype(str, Enum):
    """Names that from_pretrained takes as `dtype`."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SPEC = (
    "A folder or Hub name of a drafter or of a small model with the target's tokenizer, or `ngram`, or both as "
    "`ngram+FOLDER`; config fields may follow: ngram:tree_nodes=10,policy=fixed."
)

Target = Annotated[str, typer.Option(help="The model to speed up: a folder or Hub name.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Weights of target and drafter.")]
Device = Annotated[str, typer.Option(help="Where both run: cpu, cuda, ...")]
PackCpu = Annotated[
    bool,
    typer.Option("--pack-cpu", help="Pack linear layers for the CPU: faster passes, double the memory."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Prompts = Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON lines with id, category, turns.")]
PerCategory = Annotated[int | None, typer.Option(min=1, help="Only the first N prompts of each category.")]


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that an option was given."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object")
    return value


TemplateKwargs = Annotated[
    dict,
    typer.Option(
        "--chat-template-kwargs",
        parser=json_object,
        metavar="JSON",
        help="What the chat template is rendered with: '{\"enable_thinking\": false}'.",
    ),
]


def warn_of_template(drafters: Iterable[Drafter], tokenizer: Any, kwargs: dict | None) -> None:
    """Say on standard error, once each, where prompts are not rendered as a drafter's training texts were."""
    for mismatch in dict.fromkeys(template_mismatch(drafter, tokenizer, kwargs) for drafter in drafters):
        if mismatch is not None:
            print(f"warning: {mismatch}", file=sys.stderr)
