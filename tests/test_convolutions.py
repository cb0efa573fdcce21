"""Short convolutions along the block; those of DFlash 2's own code are in test_dialects_lattice.py."""

import pytest
import torch
from targets import plain, target
from test_lossless import assert_equals_plain, listening
from test_unroll_block import LONG, OTHER, SHORT, in_drafting, make_target, pack
from torch import nn

from hf_specdraft import BlockConfig, BlockDrafter
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.drafters.block.convolutions import BlockConvolution

FORMS = [{"group_size": 8}, {"taps": 3, "group_size": 4, "dynamic_from": "output"}]


def make_drafter(convolution=None, stirred=0.0):
    torch.manual_seed(3)
    config = BlockConfig.tiny(convolution=convolution, policy="fixed", initializer_range=0.2)
    drafter = BlockDrafter(config).eval()
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "_conv." in name:
                weight.add_(stirred * torch.randn_like(weight))
    return drafter


@pytest.mark.parametrize("convolution", FORMS)
def test_new_convolutions_are_the_identity(convolution):
    grown = make_drafter().grown(convolution=convolution)
    ours, theirs = [], []
    for drafter, heard in ((grown, ours), (make_drafter(), theirs)):
        assert_equals_plain(target("llama"), plain("llama", None, (5, 11)), listening(drafter, heard))
    assert ours and ours == theirs
    x = torch.randn(2, 8, 32)
    layer = nn.Linear(32, 32)
    assert torch.equal(grown.layers[0].mlp_conv(x, layer), layer(x))


@pytest.mark.parametrize("dynamic_from", ["input", "output"])
def test_convolutions_are_their_formula(dynamic_from):
    torch.manual_seed(0)
    config = BlockConfig.tiny()
    convolution = BlockConvolution(config, taps=2, group_size=8, dynamic_from=dynamic_from)
    nn.init.normal_(convolution.base_kernel)
    x, layer = torch.randn(1, 8, 32), nn.Linear(32, 32)  # two blocks

    def by_hand(rows, side, source):
        out = torch.zeros_like(rows)
        for t in range(8):
            dynamic = convolution.kernel_projection(source[0, t]).view(2, 2, 4)[side]
            for tap in range(2):
                if t % 4 >= tap:
                    kernel = convolution.base_kernel[side, tap] + dynamic[tap].repeat_interleave(8)
                    out[0, t] += kernel * rows[0, t - tap]
        return out

    with torch.no_grad():
        middle = layer(by_hand(x, 0, x))
        expected = by_hand(middle, 1, x if dynamic_from == "input" else middle)
        torch.testing.assert_close(convolution(x, layer), expected)


@pytest.mark.parametrize("convolution", FORMS)
def test_blocks_say_in_training_what_they_say_in_drafting(convolution):
    drafter, view = make_drafter(convolution, 0.3), TargetView(make_target())
    with torch.no_grad():
        unrolled = drafter.unroll(view, pack([[LONG, SHORT], [OTHER]]), anchors=None)
        for i in (3, 11):
            at = int(unrolled.anchors[i])
            assert at < len(LONG[0])
            drafted = in_drafting(drafter, view, LONG, at)
            torch.testing.assert_close(unrolled.hidden[i], drafted.view_as(unrolled.hidden[i]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("convolution", FORMS)
def test_greedy_output_is_plain_generates(convolution):
    assert assert_equals_plain(target("mistral"), plain("mistral"), make_drafter(convolution, 0.3)).verified > 0


@pytest.mark.parametrize(
    "convolution, message",
    [
        ({"taps": 9}, "taps"),
        ({"group_size": 5}, "group_size"),
        ({"dynamic_from": "both"}, "dynamic_from"),
        ({"kernel": 2}, "kernel"),
    ],
)
def test_bad_options_are_refused(convolution, message):
    with pytest.raises(ValueError, match=message):
        make_drafter(convolution)
