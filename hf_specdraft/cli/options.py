"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(str, Enum):
    """Names that from_pretrained takes as `dtype`."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SPEC = (
    "A folder or Hub name of a drafter or of a small model with the target's tokenizer, or `ngram`; config fields may "
    "follow: ngram:tree_nodes=10,policy=fixed."
)

Target = Annotated[str, typer.Option(help="The model to speed up: a folder or Hub name.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Weights of target and drafter.")]
Device = Annotated[str, typer.Option(help="Where both run: cpu, cuda, ...")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Prompts = Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON lines with id, category, turns.")]
PerCategory = Annotated[int | None, typer.Option(min=1, help="Only the first N prompts of each category.")]
