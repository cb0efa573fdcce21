from . import Recipe
from .dflash import TRAINER

RECIPE = Recipe(
    paper="Breaking Diffusion (DRLM; abstract only)",
    does="edit passes judge each draft by what its tokens have for them besides themselves, and keep the best",
    train={
        "drafter": {"family": "block", "block_size": 16, "edit_passes": 2, "edit_gate": "cavity"},
        "loss": {"terms": "ce", "weighting": {"decay": {"gamma": 7}}},
        "unroll": {"anchors": 512, "mode": {"name": "edit", "corruption": 0.2}},
        "trainer": TRAINER,
    },
    differs="a gate between edit passes of a drafter; the formula is derived from the abstract's principle",
)
