from . import Recipe

RECIPE = Recipe(
    paper="SpecDec++, [2405.19715](https://arxiv.org/abs/2405.19715)",
    does="a head on the drafter's states stops drafting once some token was probably wrong",
    train={
        "drafter": {"acceptance_head": {"num_layers": 3, "reject_weight": 6.0}, "num_assistant_tokens": 20},
        "loss": {"terms": "acceptance"},
        "unroll": {"mix": 0.15},
        "train_only": ["acceptance_head"],
        "trainer": {"warmup_steps": 0.03, "lr_scheduler_type": "cosine", "num_train_epochs": 3},
    },
    draft={"policy": "specdecpp"},
    differs="for an assistant saved by this package (`drafter.init_from`); the loss is divided by slots",
)
