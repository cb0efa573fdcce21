from . import Recipe

# What most papers of this lineage train with.
TRAINER = {"learning_rate": 6e-4, "warmup_steps": 0.04, "lr_scheduler_type": "cosine", "num_train_epochs": 6}

RECIPE = Recipe(
    paper="DFlash, [2602.06036](https://arxiv.org/abs/2602.06036)",
    does="a block-diffusion drafter fills a block in one pass, with the target's hidden states as context",
    train={
        "drafter": {"family": "block"},
        "loss": {"terms": "ce", "weighting": {"decay": {"gamma": 7}}},
        "unroll": {"anchors": 512},
        "trainer": TRAINER,
    },
)
