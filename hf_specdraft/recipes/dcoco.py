from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="DCOCO (abstract only; no archive number known)",
    does="pairs of neighbouring candidates are scored in parallel, their context gating what fits",
    train={
        "drafter": {"family": "block", "corrector": {"name": "selector", "top_k": 16, "rank": 256, "form": "embed"}},
        "loss": {"terms": {"base_ce": 1.0, "selector_ce": 0.5}, "weighting": {"decay": {"gamma": 7}}},
        "unroll": {"anchors": 512},
        "trainer": TRAINER,
    },
    differs="only the abstract was known: the form of the scorer is that of DFlash 2, its training ours",
)
