"""What the writers of published checkpoints share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..heads import HeadConfig, HeadedDrafter, vocabulary_map
from .base import TargetView, base_module


def refuse(dialect: str, reasons: dict[str, bool]) -> None:
    """Raise ValueError naming the reasons that hold."""
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"the format {dialect!r} cannot express what this drafter has: {'; '.join(found)}")


def copy_borrowed(
    dialect: str,
    config: HeadConfig,
    state: dict[str, Tensor],
    target: PreTrainedModel | None,
    dtype: torch.dtype,
    embedding: bool = True,
) -> None:
    """Give `config` and `state` the embedding (where the format stores it) and head that a drafter borrows, as its own.

    Raises ValueError when there is no target to copy from, or copies would not act as what is borrowed.
    """
    embedding = embedding and not config.own_embeddings
    if config.own_head and not embedding:
        return
    if target is None:
        raise ValueError(
            f"{dialect} stores {'embedding and head' if embedding else 'the head'}, which this drafter borrows from "
            "its target; give the target, so that it can be copied"
        )
    if target.dtype != dtype:
        raise ValueError(
            f"the target is {target.dtype} and the drafter {dtype}: copies would be rounded; load both as one dtype"
        )
    view = TargetView(target)
    if config.vocab_size not in (None, view.vocab_size):
        raise ValueError(
            f"the drafter's vocabulary is {config.vocab_size} and the target's {view.vocab_size}; {dialect} has one "
            "size for what is copied and what the drafter owns"
        )
    config.vocab_size = view.vocab_size
    if embedding:
        # What the module makes of each id: some scale their table.
        skip_norm = getattr(config, "skip_embed_norm", False)
        ids = torch.arange(view.vocab_size, device=target.device)
        state["embed_tokens.weight"], config.own_embeddings = view.embed(ids, skip_norm), True
    if not config.own_head:
        head = base_module(target.get_output_embeddings())
        if not isinstance(head, nn.Linear) or not head.weight.is_floating_point() or head.bias is not None:
            raise ValueError(
                f"{dialect} stores the head as one matrix, but the target's is a {type(head).__name__} that is packed "
                "or has a bias; load the target unquantised"
            )
        state["lm_head.weight"], config.own_head = head.weight, True


def assemble(family: type[HeadedDrafter], config: HeadConfig, state: dict[str, Tensor]) -> HeadedDrafter:
    """A drafter of these tensors themselves, without initialising weights of its own."""
    with torch.device("meta"):
        drafter = family(config)
    drafter.load_state_dict(state, assign=True)
    return drafter


def with_vocabulary_map(drafter: HeadedDrafter) -> dict[str, Tensor]:
    """A drafter's tensors, the vocabulary of a trimmed head as `d2t` and `t2d`."""
    state = dict(drafter.state_dict())
    if "draft_ids" in state:
        state |= vocabulary_map(state.pop("draft_ids"), drafter.config.vocab_size)
    return state


def rope_theta_and_scaling(config: Any) -> dict[str, Any]:
    """Rotary settings as transformers 4 wrote them."""
    scaling = dict(config.rope_parameters)
    theta, factor = scaling.pop("rope_theta"), scaling.pop("partial_rotary_factor", None)
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        **({} if factor is None else {"partial_rotary_factor": factor}),
    }


def speculators_method(algorithm: str, config: HeadConfig, target: PreTrainedModel | None) -> dict[str, Any]:
    """The keys every checkpoint of vllm-project/speculators has."""
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": algorithm,
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
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "tie_word_embeddings": False,
    }
