"""What specfloor's overlay adds to DeepSpec's DSpark: a prefix-attention head, block convolutions, slot embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoints import Keys


def prefix_attention(keys: Keys) -> dict:
    """The corrector of `markov_head_type` "attn" but for its rank; its tensors have our names."""
    keys.expect("markov_gate_mode", "none")
    keys.expect("markov_anchor_kv", False)
    nominated = keys.take("nominate_topk", 16)
    return {
        "name": "prefix_attention",
        "heads": keys.take("markov_num_heads"),
        "head_dim": keys.take("markov_head_dim"),
        "mlp_hidden": keys.take("markov_mlp_hidden"),
        # Serving drafts from as many tokens as training has the marginals nominate.
        "top_k": nominated,
        "nominate": nominated,
        "out_scale": keys.take("markov_out_scale"),
        "seed_std": keys.take("markov_seed_std_succ"),
    }


def backbone(keys: Keys, state: dict[str, Tensor]) -> dict:
    """Convolutions and slot embeddings, which drafters with other heads may have too; their tensors renamed to ours."""
    for name in ("markov_out_scale", "markov_seed_std_succ", "nominate_alpha", "nominate_topk"):
        keys.take(name, None)  # of training, once the head is read
    for name in ("markov_num_heads", "markov_head_dim", "markov_mlp_hidden", "markov_gate_mode", "markov_anchor_kv"):
        keys.take(name, None)  # of no other head
    fields = {}
    group_size = keys.take("short_conv_group_size", 16)
    if keys.take("short_conv", False):
        fields["convolution"] = {"taps": 2, "group_size": group_size, "dynamic_from": "output"}
        for layer in sorted({name.rsplit(".conv_pre_attn.", 1)[0] for name in state if ".conv_pre_attn." in name}):
            for theirs, ours in (("attn", "attention_conv"), ("mlp", "mlp_conv")):
                sides = [f"{layer}.conv_{side}_{theirs}" for side in ("pre", "post")]
                missing = [f"{side}.{end}" for side in sides for end in ("k_base", "corr.weight")]
                missing = [name for name in missing if name not in state]
                if missing:
                    raise ValueError(f"the checkpoint lacks {', '.join(missing)}, without which it is no drafter")
                base = [state.pop(f"{side}.k_base") for side in sides]
                dynamic = [state.pop(f"{side}.corr.weight") for side in sides]
                state[f"{layer}.{ours}.base_kernel"] = torch.stack(base)
                state[f"{layer}.{ours}.kernel_projection.weight"] = torch.cat(dynamic)
    if keys.take("slot_embed", False):
        fields["slot_embed"] = True
        if "slot_embed" in state:
            state["slot_embedding.weight"] = state.pop("slot_embed")
    return fields
