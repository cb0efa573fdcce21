"""Readers of published DFlash checkpoints: their config keys and tensor names -> BlockConfig and the internal names.

Dialects differ silently: a wrong guess leaves the text right and the drafts useless. So every key must be read or be
known not to matter, every tensor must find its place, and what cannot be told from the checkpoint is refused.

| | z-lab, SpecForge | transformers | DeepSpec | speculators |
| --- | --- | --- | --- | --- |
| layer ids | of the layer | of the layer | of the layer | of hidden_states: one more |
| slots that draft | 1.. | 1.. | 0.. | 1.., or 0.. by `sample_from_anchor` |
| embedding, head | the target's | the target's | own | own, head perhaps reduced by `d2t` |
| sliding layers | `sliding_rule` none or "query" | "distance" | none | "anchor" |
"""

from __future__ import annotations

import json
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ...heads import read_vocabulary_map

# Keys that say nothing about what the network computes: bookkeeping of transformers, special tokens of the text, and
# settings of training.
IRRELEVANT = {
    *PreTrainedConfig().to_dict(),
    *GenerationConfig().to_dict(),
    *("auto_map", "torch_dtype", "initializer_range", "use_cache", "attention_dropout", "vocab_size"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_anchors", "max_window_layers", "use_sliding_window"),
    # A drafter that owns neither an embedding nor a head, or stores both, has nothing to tie.
    "tie_word_embeddings",
}
ROPE_KEYS = {
    *("rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor"),
}
HUB_KEYS = ("revision", "token", "cache_dir", "force_download", "subfolder", "local_files_only")
_REQUIRED = object()


class Keys:
    """A config (part) that knows which of its keys were read."""

    def __init__(self, values: dict | None, where: str = "config.json"):
        self._left, self._where = dict(values or {}), where

    def __contains__(self, key: str) -> bool:
        return self._left.get(key) is not None

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The key's value; null counts as absent."""
        value = self._left.pop(key, None)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self._where} lacks {key!r}, without which the drafter cannot be told")
        return default

    def expect(self, key: str, *allowed: Any) -> None:
        """The key may be absent, null or one of `allowed`; anything else is an arithmetic we do not have."""
        value = self.take(key, None)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{self._where}: {key} = {value!r} is not supported (only {', '.join(map(repr, allowed))})"
            )

    def part(self, key: str) -> Keys:
        return Keys(self.take(key, {}), f"{key} of {self._where}")

    def close(self) -> None:
        unknown = sorted(set(self._left) - IRRELEVANT)
        if unknown:
            raise ValueError(
                f"{self._where} has keys this reader does not know: {', '.join(unknown)}. Each may change what the "
                "drafter computes; if they do not, remove them from the file"
            )


def dialect_of(config: dict) -> str | None:
    """The DFlash-lineage dialect of a config.json, None if it is none. Lineage members that need more than the block
    itself (DFlash 2, Domino, DSpark) are recognised too, so that `read` can say what is missing."""
    architecture = (config.get("architectures") or [""])[0]
    if "speculators_model_type" in config:
        return "speculators" if config["speculators_model_type"] in ("dflash", "dspark") else None
    if config.get("model_type") == "muse_glimmer_assistant":
        return "transformers"
    if architecture in ("DFlashDraftModel", "DFlash2DraftModel", "DominoDraftModel", "DSparkDraftModel"):
        return "z-lab"
    if architecture.endswith("DSparkModel") or ("num_anchors" in config and "mask_token_id" in config):
        return "deepspec"
    return None


def read(name_or_path, config: dict, fields: dict, hub: dict) -> tuple[dict, dict[str, Tensor]]:
    """BlockConfig fields and state dict of a checkpoint in a published dialect.

    fields: BlockConfig fields that overrule the reader's. hub: keyword arguments of from_pretrained, of which those
    that locate files are used. Raises ValueError for what cannot be told or done, OSError for missing files.
    """
    _refuse_relatives(config)
    keys = Keys(config)
    dialect = {"z-lab": _zlab, "transformers": _transformers, "deepspec": _deepspec, "speculators": _speculators}
    state = read_tensors(name_or_path, **{key: hub[key] for key in HUB_KEYS if key in hub})
    values = dialect[dialect_of(config)](keys, state)
    keys.close()
    values = {"dtype": config.get("dtype") or config.get("torch_dtype"), **values, **fields}
    if values.get("sliding_rule", "") is None:
        raise ValueError(
            "this layout is written by z-lab (whose reference gives the window of sliding layers no effect) and by "
            "SpecForge (which trains them with it, causal in the block), and this file does not tell which; pass "
            "sliding_rule='unbounded' for the former, sliding_rule='query' and sliding_causal=True for the latter"
        )
    return values, state


def _refuse_relatives(config: dict) -> None:
    nested = config.get("dflash_config") or {}
    flat = {**nested, **config}
    architecture = (config.get("architectures") or [""])[0]
    name = None
    if architecture == "DFlash2DraftModel" or flat.get("projector_type") == "dflash2":
        name = "DFlash 2: block convolutions and a candidate selector"
    elif architecture == "DominoDraftModel" or flat.get("projector_type") == "domino":
        name = "Domino: a GRU that corrects the logits"
    elif (
        architecture == "DSparkDraftModel"
        or "dspark" in (config.get("speculators_model_type"), flat.get("projector_type"))
        or flat.get("markov_rank")
        or flat.get("enable_confidence_head")
    ):
        name = "DSpark: Markov or confidence heads"
    if name:
        raise ValueError(
            f"the checkpoint is {name}, which this version does not read; as plain DFlash it would draft worse than it "
            "was trained to, so use a DFlash checkpoint"
        )


def _layers(keys: Keys, default_theta: float | None = None) -> dict:
    """The draft transformer, in the words of Qwen3Config."""
    values = {
        key: keys.take(key)
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
    }
    values["num_key_value_heads"] = keys.take("num_key_value_heads", values["num_attention_heads"])
    values["head_dim"] = keys.take("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values["hidden_act"] = keys.take("hidden_act", "silu")
    values["attention_bias"] = keys.take("attention_bias", False)
    values["max_position_embeddings"] = keys.take("max_position_embeddings")
    keys.expect("mlp_bias", False)
    slides = keys.take("use_sliding_window", False)
    values["sliding_window"] = keys.take("sliding_window", None)
    if slides and "layer_types" not in keys:
        raise ValueError("use_sliding_window is set but layer_types does not say for which layers; add layer_types")
    values["layer_types"] = keys.take("layer_types", ["full_attention"] * values["num_hidden_layers"])
    values["rope_parameters"] = _rope(keys, default_theta)
    return values


def _rope(keys: Keys, default_theta: float | None) -> dict:
    """`rope_parameters`, or `rope_theta` and `rope_scaling` of transformers 4, or both when they agree."""
    rope = dict(keys.take("rope_parameters", {}))
    for key, value in keys.take("rope_scaling", {}).items():
        key = "rope_type" if key == "type" else key
        if rope.setdefault(key, value) != value:
            raise ValueError(f"rope_scaling and rope_parameters disagree about {key}: {value} and {rope[key]}")
    for key in ("rope_theta", "partial_rotary_factor"):
        value = keys.take(key, None)
        if value is not None and rope.setdefault(key, value) != value:
            raise ValueError(f"{key} is {value} and, in rope_parameters, {rope[key]}")
    if "rope_theta" not in rope and default_theta is None:
        raise ValueError("the config has no rope_theta, neither at the top nor in rope_parameters")
    rope.setdefault("rope_theta", default_theta)
    rope.setdefault("rope_type", "default")
    unknown = sorted(set(rope) - ROPE_KEYS)
    if unknown:
        raise ValueError(f"rope parameters this reader does not know: {', '.join(unknown)}")
    return rope


def _zlab(keys: Keys, state: dict) -> dict:
    nested = keys.part("dflash_config")
    block_sizes = {source.take("block_size") for source in (keys, nested) if "block_size" in source}
    if len(block_sizes) != 1:
        raise ValueError(f"block_size must be given once, at the top or in dflash_config; found {sorted(block_sizes)}")
    for source in (keys, nested):
        source.expect("projector_type", "dflash")
        source.expect("causal", False)
        source.expect("is_causal", False)
        source.expect("attention_mode", "gqa")
        source.expect("markov_rank", 0)
        source.expect("enable_confidence_head", False)
    vocab_size = keys.take("vocab_size", None)
    keys.expect("draft_vocab_size", vocab_size)
    # Only SpecForge writes both styles of rope keys; files of transformers 4, z-lab's own, have but the older.
    both_styles = "rope_parameters" in keys and "rope_theta" in keys
    rule = "query" if both_styles else None if "rope_parameters" in keys else "unbounded"
    values = _layers(keys)
    if "sliding_attention" not in values["layer_types"]:
        rule = "unbounded"
    values |= {
        "vocab_size": vocab_size,
        "block_size": block_sizes.pop(),
        "mask_token_id": nested.take("mask_token_id"),
        "target_layer_ids": nested.take("target_layer_ids"),
        "num_target_layers": keys.take("num_target_layers", None),
        "sliding_rule": rule,
        "sliding_causal": rule == "query",
    }
    nested.close()
    return values


def _transformers(keys: Keys, state: dict) -> dict:
    for ours, theirs in (("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc")):
        if f"{theirs}.weight" in state:
            state[f"{ours}.weight"] = state.pop(f"{theirs}.weight")
    if "layer_types" not in keys:
        raise ValueError("config.json lacks 'layer_types', without which the drafter cannot be told")
    return _layers(keys, default_theta=500000.0) | {
        "block_size": keys.take("block_size"),
        "mask_token_id": keys.take("mask_token_id"),
        "target_layer_ids": keys.take("target_layer_ids"),
        "skip_embed_norm": True,
        "sliding_rule": "distance",
    }


def _deepspec(keys: Keys, state: dict) -> dict:
    keys.expect("markov_rank", 0)
    keys.expect("enable_confidence_head", False)
    keys.expect("confidence_head_with_markov", False)
    keys.take("markov_head_type", None)  # of no head
    values = _layers(keys)
    if keys.take("tie_word_embeddings", False) and "lm_head.weight" not in state and "embed_tokens.weight" in state:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    # Attention is full in every layer whatever the config says: the trainer builds no other mask.
    values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    return values | {
        "vocab_size": keys.take("vocab_size"),
        "block_size": keys.take("block_size"),
        "mask_token_id": keys.take("mask_token_id"),
        "target_layer_ids": keys.take("target_layer_ids"),
        "num_target_layers": keys.take("num_target_layers", None),
        "anchor_drafts": True,
        "own_embeddings": True,
        "own_head": True,
    }


def _speculators(keys: Keys, state: dict) -> dict:
    keys.take("speculators_model_type")
    keys.take("speculators_version", None)
    method = keys.part("speculators_config")
    method.expect("algorithm", "dflash")
    method.take("proposal_methods", None)
    method.take("default_proposal_method", None)
    verifier = method.take("verifier", {})
    method.close()
    network = keys.part("transformer_layer_config")
    values = _layers(network)
    vocab_size = network.take("vocab_size")
    network.close()
    keys.expect("markov_rank", 0)
    keys.expect("enable_confidence_head", False)
    draft_vocab_size = keys.take("draft_vocab_size", vocab_size)
    target_hidden_size = keys.take("target_hidden_size", values["hidden_size"])
    ids = [index - 1 for index in keys.take("aux_hidden_state_layer_ids")]
    # Trained files list the state that training takes its labels from behind those that `fc` reads.
    if "fc.weight" in state and state["fc.weight"].shape[1] == (len(ids) - 1) * target_hidden_size:
        ids.pop()
    reduced = read_vocabulary_map(state, draft_vocab_size, vocab_size)
    if not reduced and draft_vocab_size != vocab_size:
        raise ValueError(
            f"the drafter's head has {draft_vocab_size} rows for a vocabulary of {vocab_size}, but the file has no "
            "'d2t' to say which tokens they are"
        )
    return values | {
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size if reduced else None,
        "block_size": keys.take("block_size"),
        "mask_token_id": keys.take("mask_token_id"),
        "target_layer_ids": ids,
        "target_hidden_size": target_hidden_size,
        "target_name": verifier.get("name_or_path"),
        "anchor_drafts": keys.take("sample_from_anchor", False),
        "sliding_rule": "anchor",
        "sliding_causal": not keys.take("sliding_window_non_causal", False),
        "own_embeddings": True,
        "own_head": True,
    }


def read_tensors(name_or_path, **hub) -> dict[str, Tensor]:
    """All tensors of a safetensors checkpoint, in one file or sharded."""
    name = str(name_or_path)

    def find(file: str, **kwargs) -> str | None:
        return cached_file(name, file, **hub, **kwargs)

    file = find(SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if file is not None:
        return load_file(file)
    index = find(SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise ValueError(
            f"{name} has no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}; only safetensors are read, convert "
            "other formats first"
        )
    with open(index, encoding="utf-8") as handle:
        shards = sorted(set(json.load(handle)["weight_map"].values()))
    return {key: tensor for shard in shards for key, tensor in load_file(find(shard)).items()}
