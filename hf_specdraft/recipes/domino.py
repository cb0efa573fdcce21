from . import Recipe

RECIPE = Recipe(
    paper="Domino, [2605.29707](https://arxiv.org/abs/2605.29707)",
    does="a GRU over the drafted tokens corrects the logits, one token after the other",
    train={
        "drafter": {"family": "block", "corrector": {"name": "gru", "hidden_size": 1024, "rank": 256}},
        # From the marginals' loss to that of the corrected logits.
        "loss": {
            "terms": {"ce": {"weight": [0.0, 1.0, 1.0]}, "base_ce": {"weight": [1.0, 0.0, 1.0]}},
            "weighting": {"decay": {"gamma": 7}},
        },
        "unroll": {"anchors": 512},
        "trainer": {"learning_rate": 6e-4, "num_train_epochs": 6},
    },
    differs="sampled drafts are verified by their exact law instead of by equality",
)
