"""What a new drafter takes from its target: the network's shape, rotary angles, the layers read and a mask token."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...heads import HeadConfig

# Types whose frequencies do not depend on the length: cached keys stay right.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def tapped_layers(target_layers: int, draft_layers: int) -> list[int]:
    """The target layers that DFlash reads, spread from the second to the last but two; the middle one for a drafter of
    one layer. Small targets give fewer. The last layer is never read: its output is had only behind the final norm."""
    if draft_layers == 1:
        ids = [target_layers // 2]
    else:
        ids = [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
    return sorted({max(-1, min(layer, target_layers - 2)) for layer in ids})


def mask_token_for(tokenizer: Any, vocab_size: int) -> int:
    """A token that no text holds: the tokenizer's mask token; else the first row of the embedding beyond its tokens;
    else its last special token that has no role and is not in the chat template. ValueError when there is none."""
    if tokenizer is None:
        raise ValueError("mask_token_id is not given; give it, or the target's tokenizer to choose a token from")
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    roles, template = set(tokenizer.all_special_ids), str(getattr(tokenizer, "chat_template", None) or "")
    unused = [
        id
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and id not in roles and id < vocab_size and str(token) not in template
    ]
    if not unused:
        raise ValueError(
            "every token of the target's tokenizer may stand in a text; give mask_token_id, one that yours do not hold"
        )
    return max(unused)


def network_like(text: PreTrainedConfig, defaults: type[HeadConfig]) -> dict[str, Any]:
    """Fields of a drafter's network with the widths, heads, angles and special tokens of a target's text config; what
    that does not say is the drafter config's own default."""
    heads = getattr(text, "num_attention_heads", None) or max(1, text.hidden_size // 64)
    return dict(
        vocab_size=text.vocab_size,
        **{name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or defaults.rms_norm_eps,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or defaults.max_position_embeddings,
        rope_parameters=rope_of(text),
    )


def rope_of(text: PreTrainedConfig) -> dict:
    """The rotary parameters of a target's full attention, of a type whose angles do not depend on the length."""
    rope = getattr(text, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention") or rope)
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        rope = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return {"rope_type": "default", "rope_theta": 10000.0, **rope}
