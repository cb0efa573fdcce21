from . import Recipe

RECIPE = Recipe(
    paper="AdaFlash, [2607.19223](https://arxiv.org/abs/2607.19223)",
    does="distilled on the pair's own texts; a small head says how much of a block is worth verifying",
    train={
        "drafter": {"family": "block", "length_head": {}},
        "loss": {
            "terms": {"argmax_ce": 0.8, "reverse_kl": {"weight": 0.2, "clip": 10.0}, "length": 1.0},
            "weighting": {"decay": {"gamma": 7}},
        },
        "unroll": {"anchors": 512},
        "trainer": {"learning_rate": 3e-4},
    },
    draft={"policy": "adaflash"},
    differs="the divergence is clipped per slot at 10 nats, not after division by the batch's slots (`mean_clip`)",
)
