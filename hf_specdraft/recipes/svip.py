from . import Recipe

RECIPE = Recipe(
    paper="SVIP, [2411.18462](https://arxiv.org/abs/2411.18462)",
    does="drafting stops behind a token drawn from a law of high entropy",
    draft={"policy": "svip"},
)
