"""Packed linear layers: an opt-in preparation of a CPU target and drafter.

oneDNN multiplies a weight that it may lay out for its kernels beforehand much faster than one it must take as it
stands, when there are a few rows: the tokens of a draft. The same happens to plain decoding, so a fair comparison packs
both sides.

Measured on one core of a Xeon with AMX (torch 2.13), SmolLM2-135M after 200 tokens, milliseconds of a pass, each the
least of six or seven on a busy machine:

| tokens in the pass | 1 | 4 | 8 | 11 |
|---|---|---|---|---|
| bfloat16 | 147 | 192 | 234 | 241 |
| bfloat16 packed | 115 | 119 | 118 | 133 |
| float32 | 250 | 291 | 280 | 387 |
| float32 packed, from 4 rows on | 250 | 243 | 232 | 257 |

How a row is rounded depends on the number of rows beside it, packed or not. In bfloat16 that shows: for one of 48
tokens, one row and eight rows disagreed on a near tie of the two best logits, the same one with and without packing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# By dtype, (weights of the smallest layer, fewest rows) for which the packed product was the faster one. They are
# constants, because a cross-over measured anew would make rounding, and so a text, differ from process to process.
ROWS = 8  # of a draft's pass: the layout is chosen for so many, and serves any number
PAYS = {torch.bfloat16: (0, 1), torch.float32: (1 << 19, 4)}


def pack_linears(model: nn.Module) -> int:
    """Give the linear layers of a model on the CPU packed copies of their weights; returns how many now have one.

    Only layers that are nn.Linear itself, of a dtype and size in `PAYS`. The weights stay where they are, for saving,
    tying (a tied head gets a copy of its own) and few rows: the packed layers' memory doubles. A copy is used without
    gradients only, and no more once its weight was changed, moved or converted (pack again). Results equal unpacked
    ones but for rounding. Pack before the first `generate`: costs that were measured are not measured again.

    Raises ValueError for a model in training mode, quantised, or not on the CPU, and where torch lacks oneDNN or the
    machine bfloat16 instructions.
    """
    if model.training:
        raise ValueError("packed layers serve inference; call model.eval() first")
    if getattr(model, "is_quantized", False):
        raise ValueError("a quantised model's layers have kernels of their own; load it without quantisation to pack")
    if not torch.backends.mkldnn.is_available():
        raise ValueError("this build of torch has no oneDNN, which packs the weights; leave the model as it is")
    layers = [module for module in model.modules() if type(module) in (nn.Linear, PackedLinear)]
    elsewhere = {module.weight.device.type for module in layers} - {"cpu"}
    if elsewhere:
        raise ValueError(f"only a model on the CPU can be packed, but weights are on {', '.join(sorted(elsewhere))}")
    chosen = [layer for layer in layers if _pays(layer.weight)]
    if any(layer.weight.dtype == torch.bfloat16 for layer in chosen) and not has_bfloat16():
        raise ValueError("this CPU has no bfloat16 instructions; load the model with dtype float32 to pack it")
    for layer in chosen:
        layer.__class__ = PackedLinear
        if not layer.is_fresh:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
            layer.packed_from = layer.state_of_weight
    return len(chosen)


def unpack(model: nn.Module) -> int:
    """Take the packed copies away again; returns how many layers had one."""
    layers = [module for module in model.modules() if type(module) is PackedLinear]
    for layer in layers:
        layer.__class__ = nn.Linear
        del layer.packed, layer.packed_from
    return len(layers)


def _pays(weight: Tensor) -> bool:
    # A tensor of another type multiplies in its own way.
    return type(weight) is nn.Parameter and weight.dtype in PAYS and weight.numel() >= PAYS[weight.dtype][0]


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PackedLinear(nn.Linear):
    """An nn.Linear that was packed. A copy or pickle of it is not."""

    packed: Tensor | None = None
    packed_from: tuple | None = None

    @property
    def state_of_weight(self) -> tuple:
        """Differs once the weight is another, or was written to."""
        weight = self.weight
        return weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version

    @property
    def is_fresh(self) -> bool:
        return self.packed is not None and self.packed_from == self.state_of_weight

    def forward(self, x: Tensor) -> Tensor:
        if (
            self.is_fresh
            and x.dtype == self.weight.dtype
            and x.numel() // self.in_features >= PAYS[x.dtype][1]
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        ):
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "packed": None, "packed_from": None}
