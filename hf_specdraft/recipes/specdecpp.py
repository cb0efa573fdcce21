from . import Recipe

RECIPE = Recipe(
    paper="SpecDec++, [2405.19715](https://arxiv.org/abs/2405.19715)",
    does="a head on the drafter's states stops drafting once some token was probably wrong",
    draft={"policy": "specdecpp"},
)
