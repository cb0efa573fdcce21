from . import Recipe

RECIPE = Recipe(
    paper="FailFast (Fail Fast, Win Big)",
    does="drafts are extended block by block while every token is confident",
    draft={"policy": "failfast"},
    differs="any block drafter in place of a diffusion LM; later blocks read its own states (see `dloop`); "
    "rejected drafts are not reused",
)
