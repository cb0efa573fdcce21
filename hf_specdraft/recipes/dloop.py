from . import Recipe

RECIPE = Recipe(
    paper="DLoop, [2610.07659](https://arxiv.org/abs/2610.07659)",
    does="a confident drafter drafts further blocks on its own states before one verification",
    train={
        "drafter": {"family": "block", "max_stages": 3, "stage_threshold": -0.5},
        "loss": {"terms": "ce", "weighting": {"decay": {"gamma": 7}}},
        "unroll": {"anchors": 512, "mode": "loop"},
        "trainer": {"learning_rate": 1e-4, "warmup_steps": 0.04, "lr_scheduler_type": "cosine", "num_train_epochs": 1},
    },
    differs="goes on from a trained drafter (`drafter.init_from`); own states enter behind `fc`",
)
