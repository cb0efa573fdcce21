from . import Recipe

RECIPE = Recipe(
    paper="DiffuSpec, [2510.02358](https://arxiv.org/abs/2510.02358)",
    does="a beam search over a block's likely tokens, by an n-gram too; lengths follow what is accepted",
    draft={"corrector": {"name": "path"}, "policy": "adl"},
    differs="any block drafter in place of a diffusion model; the 3-gram is of the row's own text",
)
