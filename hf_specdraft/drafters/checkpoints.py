"""What the readers of published checkpoints share: every key is read or known not to matter, every tensor is found."""

from __future__ import annotations

import json
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

# Keys that say nothing about what the network computes: bookkeeping of transformers, special tokens of the text, and
# settings of training.
IRRELEVANT = {
    *PreTrainedConfig().to_dict(),
    *GenerationConfig().to_dict(),
    *("auto_map", "torch_dtype", "initializer_range", "use_cache", "attention_dropout", "vocab_size"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_anchors", "max_window_layers", "use_sliding_window"),
    # How matrices were split, not what they are.
    "pretraining_tp",
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


def network_fields(keys: Keys, default_theta: float | None = None) -> dict:
    """The draft transformer, in the words of Qwen3Config.

    default_theta: of a dialect whose files may leave rope_theta out. Raises ValueError for what we have no arithmetic
    for.
    """
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
