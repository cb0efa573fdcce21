from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="DFlash 2 (published checkpoints)",
    does="DFlash with short convolutions along the block and a selector of candidate paths",
    train={
        "drafter": {
            "family": "block",
            "block_size": 8,
            "convolution": {"taps": 2, "group_size": 16},
            "corrector": {"name": "selector", "top_k": 16, "rank": 256},
        },
        "loss": {"terms": {"base_ce": 1.0, "selector_ce": 0.5}, "weighting": {"decay": {"gamma": 4}}},
        "unroll": {"anchors": 512},
        "trainer": TRAINER,
    },
    differs="its training is not published: the loss is ours",
)
