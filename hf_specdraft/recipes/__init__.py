"""One module per paper: the parts that make its method, and how they are trained. `hf-specdraft train NAME ...` and
`hf-specdraft bench --drafter FOLDER:recipe=NAME` run them; docs/recipes.md lists them.

A recipe says nothing of the target or the data. What it leaves open (sizes, steps) is the family's default; every key
can be changed on the command line.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """A method as a paper has it.

    paper: title, and where it is found. does: the method in a sentence.
    train: what `TrainConfig` reads, without target, data and trainer.output_dir; empty for methods without weights.
    draft: fields of the drafter's config for decoding, over those it was trained with.
    differs: where this is not the paper's method, or what the paper leaves open; "" when nothing is known.
    """

    paper: str
    does: str
    train: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    differs: str = ""


@cache
def known() -> dict[str, Recipe]:
    """Every recipe by name, the module's with dashes."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name.replace("_", "-"): importlib.import_module(f"{__name__}.{name}").RECIPE for name in modules}


def get(name: str) -> Recipe:
    """A recipe by name. Raises ValueError naming those there are."""
    if name not in known():
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(known())}")
    return known()[name]


def beneath(recipe: Recipe, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a training config, where its sections leave a key out those of the recipe."""
    merged = {**copy.deepcopy(recipe.train), **given}
    for section, values in given.items():
        if isinstance(values, dict) and isinstance(recipe.train.get(section), dict):
            merged[section] = {**copy.deepcopy(recipe.train[section]), **values}
    drafter = given.get("drafter") or {}
    if "init_from" in drafter and "family" not in drafter:
        merged["drafter"].pop("family", None)  # a trained drafter has one
    return merged


def table() -> str:
    """The recipes as a Markdown table."""
    lines = ["| recipe | paper | what it does | trains | differs from the paper |", "| --- | --- | --- | --- | --- |"]
    for name, recipe in known().items():
        trains = "yes" if recipe.train else "no weights"
        lines.append(f"| `{name}` | {recipe.paper} | {recipe.does} | {trains} | {recipe.differs or '-'} |")
    return "\n".join(lines) + "\n"
