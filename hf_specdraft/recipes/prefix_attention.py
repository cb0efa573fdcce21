from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="Beyond Parallel Blindness, [2608.27339](https://arxiv.org/abs/2608.27339)",
    does="a head that reads the context and the token before scores each candidate",
    train={
        "drafter": {
            "family": "block",
            "block_size": 7,
            "anchor_drafts": True,
            "slot_embed": True,
            "convolution": {"dynamic_from": "output"},
            "corrector": {"name": "prefix_attention"},
            "confidence": {"with_markov": True},
        },
        "loss": {
            "terms": {"ce": 0.1, "tv": 1.8, "confidence": 1.0, "nomination": 0.1},
            "weighting": {"decay": {"gamma": 4}},
        },
        "unroll": {"anchors": 512},
        "trainer": {**TRAINER, "num_train_epochs": 10},
    },
    differs="its floors are `hf-specdraft floors`",
)
