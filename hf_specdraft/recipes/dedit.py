from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="DEdit (2609.38510)",
    does="the drafter reads its own draft again and repairs it before verification",
    train={
        "drafter": {"family": "block", "block_size": 32, "edit_passes": 2},
        "loss": {"terms": "ce", "weighting": {"decay": {"gamma": 14}}},
        "unroll": {"anchors": 512, "mode": {"name": "edit", "mix": "keep_confident"}},
        "trainer": TRAINER,
    },
    differs="how confidence steers the mixture is not public: here the confident tokens stay the drafter's",
)
