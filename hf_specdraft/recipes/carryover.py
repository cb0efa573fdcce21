from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="Carryover, [2609.14717](https://arxiv.org/abs/2609.14717)",
    does="the target's states of rejected tokens are context for the next draft",
    train={
        "drafter": {"family": "block", "carryover": True},
        "loss": {"terms": "ce", "weighting": {"decay": {"gamma": 7}}},
        "unroll": {"anchors": 512, "mode": "carryover"},
        "trainer": {**TRAINER, "num_train_epochs": 3},
    },
    differs="goes on from a trained drafter (`drafter.init_from`); carried rows keep their own positions",
)
