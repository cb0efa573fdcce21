from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="ForeSpark (abstract only)",
    does="draft and verify budgets of all rows are chosen together before drafting",
    train={
        "drafter": {"family": "block", "predraft": {}},
        "loss": {"terms": {"ce": 1.0, "survival": 1.0}, "weighting": {"decay": {"gamma": 7}}},
        "unroll": {"anchors": 512},
        "trainer": TRAINER,
    },
    draft={"policy": "forespark"},
    differs="only the abstract was known: estimator and scheduler are ours",
)
