"""hf-specdraft recipes: the methods that can be trained and run by name."""

from __future__ import annotations

from .. import recipes as known_recipes


def recipes() -> None:
    """List the recipes, one per paper, as a Markdown table (docs/recipes.md holds it)."""
    print(known_recipes.table(), end="")
