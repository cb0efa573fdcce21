from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="LiLiCorr, [2608.20530](https://arxiv.org/abs/2608.20530)",
    does="a small network scores pairs of neighbouring candidates, a greedy walk picks the path",
    train={
        "drafter": {"family": "block", "corrector": {"name": "lilicorr", "top_k": 8, "factor_dim": 1024}},
        "loss": {
            "terms": {"base_ce": 1.0, "lilicorr_ce": 0.25, "lilicorr_penalty": 0.25},
            "weighting": {"decay": {"gamma": 7}},
        },
        "unroll": {"anchors": 512},
        "trainer": TRAINER,
    },
    differs="the head's terms are weighed and divided like all others, by slots, not by the forced slots alone",
)
