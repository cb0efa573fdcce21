from . import Recipe

RECIPE = Recipe(
    paper="DDTree, [2604.12989](https://arxiv.org/abs/2604.12989)",
    does="the likeliest prefixes of a block's marginals, or of a corrector's conditionals, as one tree",
    draft={"tree_nodes": 30},
    differs="corrected drafters grow the tree over their conditionals",
)
