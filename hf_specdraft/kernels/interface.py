"""`attn_implementation="specdraft_tree"`: a transformers model whose tree passes go through `tree_attention`.

A tree reaches the model as a 4-D boolean mask, which transformers hands to the attention function unchanged, so nothing
else has to be passed along and no model is patched. Whatever is not a short masked pass is `sdpa`, its masks included.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import tree_attention

ATTENTION_NAME = "specdraft_tree"
# Longer passes are prefill: SDPA's tiles are larger than the kernel's, which are shaped for a tree's few rows.
_MAX_ROWS = 256


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [B, Hq, N, D] -> ([B, N, Hq, Dv], None).

    Raises ValueError for what neither SDPA nor the kernel computes and SDPA's integration would drop silently.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{ATTENTION_NAME!r} has no attention sinks; load the target with attn_implementation='eager'")
    takes_kernel = (
        isinstance(attention_mask, Tensor)
        and attention_mask.dtype == torch.bool
        and attention_mask.shape[1] == 1
        and 1 < query.shape[2] <= _MAX_ROWS
        and attention_mask.shape[-1] == key.shape[2]
        and dropout == 0.0
        and kwargs.get("position_bias") is None
        and kwargs.get("softcap") is None
        and not torch.compiler.is_compiling()
    )
    if not takes_kernel:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = tree_attention(query, key, value, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)
# Without its mask function, transformers would make no mask at all for this name, and padding would be attended to.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
