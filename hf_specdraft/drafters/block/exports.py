"""Writers of the dialects that `dialects.py` reads: BlockConfig and internal names -> their config keys and names.

`zlab` and `specforge` share a layout; they differ in how sliding layers see (see dialects.py). `transformers` is the
one native class, `muse_glimmer_assistant`. What a dialect cannot say is refused, never dropped.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from ...correctors.gru import GruHead
from ..base import TargetView
from ..exporting import (
    assemble,
    copy_borrowed,
    refuse,
    rope_theta_and_scaling,
    speculators_method,
    with_vocabulary_map,
)

if TYPE_CHECKING:
    from .configuration_block import BlockConfig
    from .modeling_block import BlockDrafter

DIALECTS = ("zlab", "specforge", "transformers", "speculators", "deepspec")
# The parts that dialects either store or leave to the target.
_STORES = {"zlab": False, "specforge": False, "transformers": False, "speculators": True, "deepspec": True}
# (sliding_rule, sliding_causal) as the reader of a dialect has it; None: either. Without sliding layers both are moot.
_SLIDING = {
    "zlab": ("unbounded", False),
    "specforge": ("query", True),
    "transformers": ("distance", False),
    "speculators": ("anchor", None),
    "deepspec": ("distance", False),
}
# Correctors that a dialect can say, and whether it can say a confidence head.
_CORRECTORS = {"specforge": ("markov", "gru"), "speculators": ("markov",), "deepspec": ("markov",)}
_CONFIDENCE = ("specforge", "speculators", "deepspec")
# Tensors of ours -> theirs.
_DSPARK = {"corrector.": "markov_head.", "confidence.": "confidence_head."}
_NETWORK = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "layer_types", "sliding_window"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def write(
    drafter: BlockDrafter, dialect: str, target: PreTrainedModel | None
) -> tuple[BlockDrafter, dict, dict[str, Tensor]]:
    """See `Drafter.to_dialect`."""
    if target is not None:
        drafter.check(TargetView(target))
    _refuse(drafter, dialect)
    config = copy.deepcopy(drafter.config)
    state = dict(drafter.state_dict())
    if "sliding_attention" not in config.layer_types:
        config.sliding_rule = "unbounded" if dialect == "specforge" else _SLIDING[dialect][0]
        config.sliding_causal, config.sliding_window = False, None
    if target is not None and config.num_target_layers is None and dialect in ("zlab", "specforge", "deepspec"):
        config.num_target_layers = TargetView(target).num_layers
    if _STORES[dialect]:
        copy_borrowed(dialect, config, state, target, drafter.dtype)
        config.skip_embed_norm = False
    elif dialect == "transformers":
        _leave_embed_norm(config, target)
        config.vocab_size = None
    elif config.vocab_size is None:
        if target is None:
            raise ValueError(
                f"{dialect} names the vocabulary's size, which this drafter does not know; give the target"
            )
        config.vocab_size = TargetView(target).vocab_size
    written = assemble(type(drafter), config, state)
    writer = {"transformers": _transformers, "speculators": _speculators, "deepspec": _deepspec}.get(dialect, _zlab)
    values, tensors = writer(written, dialect, target)
    return written, {**values, "dtype": str(drafter.dtype).removeprefix("torch.")}, tensors


def _refuse(drafter: BlockDrafter, dialect: str) -> None:
    config = drafter.config
    slides = "sliding_attention" in config.layer_types
    rule, causal = _SLIDING[dialect]
    corrector = (config.corrector or {}).get("name")
    confidence = drafter.confidence
    shifts = dialect in ("speculators", "deepspec") or (dialect == "specforge" and (corrector or confidence))
    reasons = {
        f"the corrector {corrector!r}": corrector is not None and corrector not in _CORRECTORS.get(dialect, ()),
        "a confidence head": confidence is not None
        and (dialect not in _CONFIDENCE or (dialect == "specforge" and corrector == "gru")),
        "calibrated temperatures of its confidence head": bool(confidence and confidence.temperatures),
        "a length head": config.length_head is not None,
        "convolutions in the block": config.convolution is not None,
        "embeddings of its slots": config.slot_embed,
        "an estimate before drafting": config.predraft is not None,
        "its own embeddings: there they are the target's": config.own_embeddings and not _STORES[dialect],
        "its own head: there it is the target's": config.own_head and not _STORES[dialect],
        "a low-rank head": config.draft_head_rank is not None,
        "a reduced vocabulary": config.draft_vocab_size is not None and dialect != "speculators",
        "the target's final state among those read": config.reads_final,
        "rejected tokens that are read": config.carryover,
        "drafts of several blocks": config.max_stages > 1,
        "drafts that are edited": config.edit_passes > 0,
        "an anchor slot that drafts": config.anchor_drafts and not shifts,
        "an anchor slot that does not draft": not config.anchor_drafts
        and (dialect == "deepspec" or (dialect == "specforge" and (corrector == "markov" or confidence is not None))),
        "another hidden size than its target's": config.target_hidden_size != config.hidden_size
        and dialect != "speculators",
        "biases in attention": config.attention_bias and dialect == "transformers",
        "a partial rotary factor": config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0
        and dialect == "transformers",
        "sliding layers": slides and dialect == "deepspec",
        f"sliding layers by the rule {config.sliding_rule!r}"
        f"{' causal in the block' if config.sliding_causal else ''}": slides
        and (config.sliding_rule != rule or causal not in (None, config.sliding_causal)),
    }
    refuse(dialect, reasons)


def _leave_embed_norm(config: BlockConfig, target: PreTrainedModel | None) -> None:
    """transformers leaves out an embedding's `embed_norm`, which only Muse targets have."""
    if not config.skip_embed_norm and target is not None and hasattr(target.get_input_embeddings(), "embed_norm"):
        raise ValueError(
            "transformers leaves out the target's embed_norm, with which this drafter works (skip_embed_norm=False)"
        )
    config.skip_embed_norm = True


def _network(config: BlockConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in _NETWORK} | {"attention_dropout": 0.0}


def _qwen3(config: BlockConfig) -> dict[str, Any]:
    slides = "sliding_attention" in config.layer_types
    return _network(config) | {
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "use_sliding_window": slides,
        "vocab_size": config.vocab_size,
    }


def _zlab(drafter: BlockDrafter, dialect: str, target: PreTrainedModel | None) -> tuple[dict, dict[str, Tensor]]:
    config = drafter.config
    values = _qwen3(config) | rope_theta_and_scaling(config)
    if dialect == "specforge":  # which alone writes both styles
        values |= {"rope_parameters": config.rope_parameters}
    architecture, heads, names = _heads(drafter)
    values |= {
        "architectures": [architecture],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids, **heads},
        "tie_word_embeddings": True,
    }
    return values, _renamed(drafter.state_dict(), names)


def _heads(drafter: BlockDrafter) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Of SpecForge's layout: the architecture, what `dflash_config` says of the heads, and their tensors' names."""
    head = drafter.corrector
    if isinstance(head, GruHead):
        settings = {
            "projector_type": "domino",
            "emb_dim": head.embed_proj[0].out_features,
            "gru_hidden_dim": head.prefix_gru.hidden_size,
            "pure_draft_prefix_len": head.free_slots,
            "shift_label": drafter.config.anchor_drafts,
        }
        return "DominoDraftModel", settings, {"corrector.": ""}
    if head is None and drafter.confidence is None:
        return "DFlashDraftModel", {}, {}
    return "DSparkDraftModel", {"projector_type": "dspark", **_dspark(drafter)}, _DSPARK


def _dspark(drafter: BlockDrafter) -> dict[str, Any]:
    """What DSpark configs say of the heads."""
    head, confidence = drafter.corrector, drafter.confidence
    values = {"markov_rank": 0 if head is None else head.rank, "enable_confidence_head": confidence is not None}
    if head is not None:
        values["markov_head_type"] = head.kind
    if confidence is not None:
        values["confidence_head_with_markov"] = confidence.with_markov
    return values


def _renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """The tensors, those whose names begin with a key of `names` under its value instead."""
    for ours, theirs in names.items():
        state = {theirs + k.removeprefix(ours) if k.startswith(ours) else k: tensor for k, tensor in state.items()}
    return state


def _transformers(
    drafter: BlockDrafter, dialect: str, target: PreTrainedModel | None
) -> tuple[dict, dict[str, Tensor]]:
    config = drafter.config
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    values = _network(config) | {
        "model_type": "muse_glimmer_assistant",
        "architectures": ["MuseGlimmerAssistantModel"],
        "rope_parameters": config.rope_parameters,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
    }
    if config.sliding_window is None:
        del values["sliding_window"]  # must be a number there, and acts on nothing
    return values, {names.get(name, name): tensor for name, tensor in drafter.state_dict().items()}


def _deepspec(drafter: BlockDrafter, dialect: str, target: PreTrainedModel | None) -> tuple[dict, dict[str, Tensor]]:
    config = drafter.config
    values = _qwen3(config) | {
        "architectures": ["Qwen3DSparkModel"],
        "rope_parameters": config.rope_parameters,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": config.num_target_layers,
        **_dspark(drafter),
        "tie_word_embeddings": False,
    }
    return values, _renamed(drafter.state_dict(), _DSPARK)


def _speculators(drafter: BlockDrafter, dialect: str, target: PreTrainedModel | None) -> tuple[dict, dict[str, Tensor]]:
    config = drafter.config
    is_dspark = drafter.corrector is not None or drafter.confidence is not None
    values = speculators_method("dspark" if is_dspark else "dflash", config, target) | {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        "transformer_layer_config": _qwen3(config) | {"rope_parameters": config.rope_parameters},
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        # Indices of hidden_states, whose first entry is the embedding.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sample_from_anchor": config.anchor_drafts,
        "sliding_window_non_causal": not config.sliding_causal,
        **(_dspark(drafter) if is_dspark else {}),
    }
    return values, _renamed(with_vocabulary_map(drafter), _DSPARK)
