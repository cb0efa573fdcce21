"""What holds of every corrector, found by looking."""

import pytest
import torch
from test_unroll_block import LONG, OTHER, SHORT, make_drafter, pack, view  # noqa: F401 (a fixture)

from hf_specdraft import correctors
from hf_specdraft.training.loss import DraftLoss

# Small ones of what has sizes.
SMALL = {
    "markov": {"rank": 4},
    "gru": {"rank": 4, "hidden_size": 6},
    "lilicorr": {"top_k": 4, "hidden_size": 16, "factor_dim": 8, "num_heads": 2},
    "selector": {"top_k": 4, "rank": 4},
    "prefix_attention": {"rank": 8, "heads": 2, "head_dim": 8, "mlp_hidden": 16, "top_k": 4},
}
KINDS = [(name, SMALL.get(name, {})) for name in sorted(correctors.known())]
KINDS += [("markov", {"rank": 4, "kind": kind}) for kind in ("gated", "rnn")]


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_it_is_taught_in_bfloat16_beside_the_drafter(name, options, view):  # noqa: F811
    """As the trainer does it on CPUs and GPUs: float32 weights, autocast forward, finite gradients for all of it."""
    drafter = make_drafter(corrector={"name": name, **options}).train()
    with torch.autocast("cpu", torch.bfloat16):
        out = DraftLoss("ce")(drafter, view, pack([[SHORT, LONG], [OTHER]]))
    out["loss"].backward()
    gradients = [p.grad for p in drafter.corrector.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert bool(gradients) == bool(list(drafter.corrector.parameters()))
    assert drafter.layers[0].mlp.up_proj.weight.grad.isfinite().all()
