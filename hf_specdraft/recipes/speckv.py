from . import Recipe

RECIPE = Recipe(
    paper="SpecKV, [2605.02888](https://arxiv.org/abs/2605.02888)",
    does="a small controller picks each round's length from the last round's entropy and confidence",
    draft={"policy": "speckv"},
    differs="features of the round before, and tokens per second: tokens per round always favours the longest",
)
