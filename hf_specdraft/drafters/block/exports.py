"""Writers of the dialects that `dialects.py` reads: BlockConfig and internal names -> their config keys and names.

`zlab` and `specforge` share a layout; they differ in how sliding layers see (see dialects.py). `transformers` is the
one native class, `muse_glimmer_assistant`. What a dialect cannot say is refused, never dropped.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...heads import vocabulary_map
from ..base import TargetView, base_module

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
        _copy_borrowed(config, state, dialect, target, drafter.dtype)
    elif dialect == "transformers":
        _leave_embed_norm(config, target)
        config.vocab_size = None
    elif config.vocab_size is None:
        if target is None:
            raise ValueError(
                f"{dialect} names the vocabulary's size, which this drafter does not know; give the target"
            )
        config.vocab_size = TargetView(target).vocab_size
    with torch.device("meta"):
        written = type(drafter)(config)
    written.load_state_dict(state, assign=True)
    writer = {"transformers": _transformers, "speculators": _speculators, "deepspec": _deepspec}.get(dialect, _zlab)
    values, tensors = writer(written, dialect, target)
    return written, {**values, "dtype": str(drafter.dtype).removeprefix("torch.")}, tensors


def _refuse(drafter: BlockDrafter, dialect: str) -> None:
    config = drafter.config
    slides = "sliding_attention" in config.layer_types
    rule, causal = _SLIDING[dialect]
    reasons = {
        "its own embeddings: there they are the target's": config.own_embeddings and not _STORES[dialect],
        "its own head: there it is the target's": config.own_head and not _STORES[dialect],
        "a low-rank head": config.draft_head_rank is not None,
        "a reduced vocabulary": config.draft_vocab_size is not None and dialect != "speculators",
        "an anchor slot that drafts": config.anchor_drafts and dialect not in ("speculators", "deepspec"),
        "an anchor slot that does not draft": not config.anchor_drafts and dialect == "deepspec",
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
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"the format {dialect!r} cannot express what this drafter has: {'; '.join(found)}")


def _copy_borrowed(
    config: BlockConfig, state: dict[str, Tensor], dialect: str, target: PreTrainedModel | None, dtype: torch.dtype
) -> None:
    """Give a drafter the embedding and head that it borrows, as its own."""
    if config.own_embeddings and config.own_head:
        return
    if target is None:
        raise ValueError(
            f"{dialect} stores embedding and head, which this drafter borrows from its target; give the target, so "
            "that they can be copied"
        )
    if target.dtype != dtype:
        raise ValueError(
            f"the target is {target.dtype} and the drafter {dtype}: copies would be rounded; load both as one dtype"
        )
    view = TargetView(target)
    if config.vocab_size not in (None, view.vocab_size):
        raise ValueError(
            f"the drafter's vocabulary is {config.vocab_size} and the target's {view.vocab_size}; {dialect} has "
            "one size for what is copied and what the drafter owns"
        )
    config.vocab_size = view.vocab_size
    if not config.own_embeddings:
        # What the module makes of each id: some scale their table.
        table = view.embed(torch.arange(view.vocab_size, device=target.device), skip_norm=config.skip_embed_norm)
        state["embed_tokens.weight"], config.own_embeddings, config.skip_embed_norm = table, True, False
    if not config.own_head:
        head = base_module(target.get_output_embeddings())
        if not isinstance(head, nn.Linear) or not head.weight.is_floating_point() or head.bias is not None:
            raise ValueError(
                f"{dialect} stores the head as one matrix, but the target's is a {type(head).__name__} that is packed "
                "or has a bias; load the target unquantised"
            )
        state["lm_head.weight"], config.own_head = head.weight, True


def _leave_embed_norm(config: BlockConfig, target: PreTrainedModel | None) -> None:
    """transformers leaves out an embedding's `embed_norm`, which only Muse targets have."""
    if not config.skip_embed_norm and target is not None and hasattr(target.get_input_embeddings(), "embed_norm"):
        raise ValueError(
            "transformers leaves out the target's embed_norm, with which this drafter works (skip_embed_norm=False)"
        )
    config.skip_embed_norm = True


def _network(config: BlockConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in _NETWORK} | {"attention_dropout": 0.0}


def _rope(config: BlockConfig) -> dict[str, Any]:
    """As transformers 4 wrote it, which z-lab's files have."""
    scaling = dict(config.rope_parameters)
    theta, factor = scaling.pop("rope_theta"), scaling.pop("partial_rotary_factor", None)
    plain = scaling == {"rope_type": "default"}
    return {
        "rope_theta": theta,
        "rope_scaling": None if plain else scaling,
        **({} if factor is None else {"partial_rotary_factor": factor}),
    }


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
    values = _qwen3(config) | _rope(config)
    if dialect == "specforge":  # which alone writes both styles
        values |= {"rope_parameters": config.rope_parameters}
    values |= {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids},
        "tie_word_embeddings": True,
    }
    return values, drafter.state_dict()


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
        "markov_rank": 0,
        "enable_confidence_head": False,
        "tie_word_embeddings": False,
    }
    return values, drafter.state_dict()


def _speculators(drafter: BlockDrafter, dialect: str, target: PreTrainedModel | None) -> tuple[dict, dict[str, Tensor]]:
    config = drafter.config
    state = dict(drafter.state_dict())
    if config.draft_vocab_size is not None:
        state |= vocabulary_map(state.pop("draft_ids"), config.vocab_size)
    same_width = config.target_hidden_size == config.hidden_size
    values = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_assistant_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": config.target_name or (target.name_or_path if target is not None else None),
                "architectures": [] if target is None else list(target.config.architectures or ()),
            },
        },
        "transformer_layer_config": _qwen3(config) | {"rope_parameters": config.rope_parameters},
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        # Indices of hidden_states, whose first entry is the embedding.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None if same_width else config.target_hidden_size,
        "sample_from_anchor": config.anchor_drafts,
        "sliding_window_non_causal": not config.sliding_causal,
        "tie_word_embeddings": False,
    }
    return values, state
