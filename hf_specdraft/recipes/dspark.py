from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="DSpark, [2607.05147](https://arxiv.org/abs/2607.05147)",
    does="a Markov head makes a block's tokens follow each other, a confidence head says where to stop verifying",
    train={
        "drafter": {
            "family": "block",
            "block_size": 7,
            "anchor_drafts": True,
            "corrector": {"name": "markov", "rank": 256},
            "confidence": {"with_markov": True},
        },
        "loss": {"terms": {"ce": 0.1, "tv": 1.8, "confidence": 1.0}, "weighting": {"decay": {"gamma": 4}}},
        "unroll": {"anchors": 512},
        "trainer": {**TRAINER, "num_train_epochs": 10},
    },
    draft={"policy": "dspark"},
    differs="for one row the scheduler is a cut where tokens per second stop to rise; batches use `dspark_batch`",
)
