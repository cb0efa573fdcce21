"""Writers of the EAGLE-3 dialects that `dialects.py` reads: what a dialect cannot say is refused, never dropped."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from ..base import TargetView
from ..exporting import (
    assemble,
    copy_borrowed,
    refuse,
    rope_theta_and_scaling,
    speculators_method,
    with_vocabulary_map,
)
from .configuration_eagle3 import Eagle3Config, tapped_layers

if TYPE_CHECKING:
    from .modeling_eagle3 import Eagle3Drafter

DIALECTS = ("safeailab", "speculators")
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def write(
    drafter: Eagle3Drafter, dialect: str, target: PreTrainedModel | None
) -> tuple[Eagle3Drafter, dict, dict[str, Tensor]]:
    """See `Drafter.to_dialect`."""
    depth = drafter.config.num_target_layers
    if target is not None:
        view = TargetView(target)
        drafter.check(view)
        depth = view.num_layers
    config = copy.deepcopy(drafter.config)
    by_rule = _by_rule(config, depth)
    original = dialect == "safeailab"
    refuse(
        dialect,
        {
            "the target's final state among those it reads (reads_final)": config.reads_final,
            "a low-rank head": config.draft_head_rank is not None,
            "layers read other than the three of the paper's rule": original and not by_rule,
            "more than one layer": original and config.num_hidden_layers > 1,
            "norms of queries and keys": original and config.qk_norm,
            "biases in attention": original and config.attention_bias,
            "a partial rotary factor": original and config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0,
            **{name: original and getattr(config, name) for name in _NORMS},
        },
    )
    if original and by_rule:
        config.target_layer_ids = None
    state = dict(drafter.state_dict())
    copy_borrowed(dialect, config, state, target, drafter.dtype, embedding=not original)
    written = assemble(type(drafter), config, state)
    values, tensors = (_safeailab if original else _speculators)(written, target)
    return written, {**values, "dtype": str(drafter.dtype).removeprefix("torch.")}, tensors


def _by_rule(config: Eagle3Config, depth: int | None) -> bool:
    """Whether a drafter reads the layers that a file which names none stands for."""
    if config.target_layer_ids is None or depth is None:
        return config.target_layer_ids is None
    try:
        return config.target_layer_ids == tapped_layers(depth)
    except ValueError:  # a shallow target has no such three
        return False


def _network(config: Eagle3Config) -> dict[str, Any]:
    keys = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "vocab_size"),
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    return {key: getattr(config, key) for key in keys} | {"model_type": "qwen3" if config.qk_norm else "llama"}


def _safeailab(drafter: Eagle3Drafter, target: PreTrainedModel | None) -> tuple[dict, dict[str, Tensor]]:
    config = drafter.config
    values = _network(config) | rope_theta_and_scaling(config)
    values |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "tie_word_embeddings": False,
    }
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    state = with_vocabulary_map(drafter)
    return values, {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in state.items()}


def _speculators(drafter: Eagle3Drafter, target: PreTrainedModel | None) -> tuple[dict, dict[str, Tensor]]:
    config = drafter.config
    ids = config.target_layer_ids
    values = speculators_method("eagle3", config, target) | {
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": _network(config) | {"rope_parameters": config.rope_parameters},
        # Indices of hidden_states, whose first entry is the embedding; null stands for the paper's rule.
        "eagle_aux_hidden_state_layer_ids": None if ids is None else [layer + 1 for layer in ids],
        "embed_requires_grad": False,
        **{name: getattr(config, name) for name in _NORMS},
    }
    return values, with_vocabulary_map(drafter)
