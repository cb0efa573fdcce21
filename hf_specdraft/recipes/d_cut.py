from . import Recipe

RECIPE = Recipe(
    paper="D-Cut, [2607.14647](https://arxiv.org/abs/2607.14647)",
    does="the rows of a batch share one budget of tokens to verify, by confidence and measured costs",
    draft={"policy": "d_cut"},
)
