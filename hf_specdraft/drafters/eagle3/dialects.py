"""Readers of published EAGLE-3 checkpoints: their config keys and tensor names -> Eagle3Config and the internal names.

As for DFlash, a wrong guess leaves the text right and the drafts useless: what cannot be told is refused.

| | SafeAILab, SpecForge | DeepSpec | speculators |
| --- | --- | --- | --- |
| layer ids | of the layer, or none: the rule | of the layer | of hidden_states: one more, or null: the rule |
| first layer | `midlayer` | `layers.0` | `layers.0` |
| embedding | the target's unless stored | own | own |
| `norm_output` | the head reads the normed state (always) | - | the next step is fed the normed state |
"""

from __future__ import annotations

from torch import Tensor

from ...heads import read_vocabulary_map
from ..checkpoints import HUB_KEYS, Keys, network_fields, read_tensors


def dialect_of(config: dict) -> str | None:
    """The EAGLE-3 dialect of a config.json, None if it is none."""
    architecture = (config.get("architectures") or [""])[0]
    if "speculators_model_type" in config:
        return "speculators" if config["speculators_model_type"] == "eagle3" else None
    if architecture.endswith("Eagle3Model") and "ttt_length" in config:
        return "deepspec"
    if architecture == "LlamaForCausalLMEagle3" or (
        architecture == "LlamaForCausalLM" and "draft_vocab_size" in config
    ):
        return "safeailab"
    return None


def read(name_or_path, config: dict, fields: dict, hub: dict) -> tuple[dict, dict[str, Tensor]]:
    """Eagle3Config fields and state dict of a checkpoint in a published dialect.

    fields: Eagle3Config fields that overrule the reader's. hub: keyword arguments of from_pretrained, of which those
    that locate files are used. Raises ValueError for what cannot be told or done, OSError for missing files.
    """
    keys = Keys(config)
    dialect = {"safeailab": _safeailab, "deepspec": _deepspec, "speculators": _speculators}[dialect_of(config)]
    state = read_tensors(name_or_path, **{key: hub[key] for key in HUB_KEYS if key in hub})
    values = dialect(keys, state)
    keys.close()
    values |= {
        "own_embeddings": "embed_tokens.weight" in state,
        "own_head": True,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in state,
    }
    return {"dtype": config.get("dtype") or config.get("torch_dtype"), **values, **fields}, state


def _network(keys: Keys, default_theta: float | None = None) -> dict:
    values = network_fields(keys, default_theta)
    types = values.pop("layer_types")
    values.pop("sliding_window")
    if set(types) != {"full_attention"}:
        raise ValueError(f"layer_types {types} are not supported: EAGLE-3 drafters attend to everything")
    return values


def _vocabulary(state: dict, vocab_size: int, draft_vocab_size: int) -> dict:
    reduced = read_vocabulary_map(state, draft_vocab_size, vocab_size)
    if not reduced and draft_vocab_size != vocab_size:
        raise ValueError(
            f"the drafter's head has {draft_vocab_size} rows for a vocabulary of {vocab_size}, but the file has no "
            "'d2t' to say which tokens they are"
        )
    return {"vocab_size": vocab_size, "draft_vocab_size": draft_vocab_size if reduced else None}


def _safeailab(keys: Keys, state: dict) -> dict:
    for name in [name for name in state if name.startswith("midlayer.")]:
        state[name.replace("midlayer.", "layers.0.", 1)] = state.pop(name)
    # SpecForge's names; the one is what every EAGLE-3 drafter does, the other we have no checkpoint to tell by.
    keys.expect("norm_output", True)
    keys.expect("fc_norm", False)
    eagle = keys.part("eagle_config")
    ids = eagle.take("eagle_aux_hidden_state_layer_ids", None)
    eagle.close()
    values = _network(keys, default_theta=10000.0)
    vocab_size = keys.take("vocab_size")
    return values | {
        "target_layer_ids": ids,
        "target_hidden_size": keys.take("target_hidden_size", values["hidden_size"]),
        **_vocabulary(state, vocab_size, keys.take("draft_vocab_size", vocab_size)),
    }


def _deepspec(keys: Keys, state: dict) -> dict:
    keys.take("step_loss_decay", None)
    values = _network(keys)
    keys.expect("draft_num_hidden_layers", values["num_hidden_layers"])
    if keys.take("tie_word_embeddings", False) and "lm_head.weight" not in state and "embed_tokens.weight" in state:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    return values | {
        "vocab_size": keys.take("vocab_size"),
        "target_layer_ids": keys.take("target_layer_ids"),
        "num_target_layers": keys.take("num_target_layers", None),
        "target_name": keys.take("target_model_name_or_path", None),
        "num_assistant_tokens": keys.take("ttt_length"),
    }


def _speculators(keys: Keys, state: dict) -> dict:
    keys.take("speculators_model_type")
    keys.take("speculators_version", None)
    keys.take("embed_requires_grad", None)
    method = keys.part("speculators_config")
    method.expect("algorithm", "eagle3")
    proposals = method.take("proposal_methods", [])
    method.take("default_proposal_method", None)
    verifier = method.take("verifier", {})
    method.close()
    network = keys.part("transformer_layer_config")
    values = _network(network)
    vocab_size = network.take("vocab_size")
    network.close()
    target_hidden_size = keys.take("target_hidden_size", values["hidden_size"])
    ids = keys.take("eagle_aux_hidden_state_layer_ids", None)
    # Trained files list the state that training takes its labels from behind those that `fc` reads.
    if ids and "fc.weight" in state and state["fc.weight"].shape[1] == (len(ids) - 1) * target_hidden_size:
        ids = ids[:-1]
    depth = {"num_assistant_tokens": proposals[0]["speculative_tokens"]} if proposals else {}
    return {
        **values,
        **depth,
        **{
            name: keys.take(name, False)
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
        **_vocabulary(state, vocab_size, keys.take("draft_vocab_size", vocab_size)),
        "target_layer_ids": None if ids is None else [index - 1 for index in ids],
        "target_hidden_size": target_hidden_size,
        "target_name": verifier.get("name_or_path"),
    }
