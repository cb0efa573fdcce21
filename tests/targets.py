"""The tiny random targets that equality tests run on, and their plain outputs.

Vocabulary 64, hidden size 32, at least two layers, large weights (so that outputs are varied, not one token repeated),
sliding windows of 8 tokens (shorter than the texts), no end token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB = 64
NEW_TOKENS = 24
# Unequal lengths: two beyond the sliding window, two not, one of each already in the prompt.
LENGTHS = (5, 8, 11, 3)

_TOKENS = dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=0)
_COMMON = dict(
    _TOKENS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.5,
)
_HEADS = dict(_COMMON, head_dim=8)
_WINDOW = dict(_HEADS, sliding_window=8)
# A head tied to random embeddings mostly repeats its input.
_UNTIED = dict(_WINDOW, tie_word_embeddings=False)


@dataclass(frozen=True)
class TinyTarget:
    """config, model: names of transformers' classes. attention: the implementations it has, of sdpa and eager. trees:
    whether it accepts tree masks (others get chains)."""

    config: str
    model: str
    settings: dict[str, Any] = field(hash=False)
    attention: tuple[str, ...] = ("sdpa", "eager")
    trees: bool = True


TARGETS = {
    "llama": TinyTarget("LlamaConfig", "LlamaForCausalLM", _COMMON),
    "qwen2": TinyTarget("Qwen2Config", "Qwen2ForCausalLM", _COMMON),
    "qwen2_sliding": TinyTarget(
        "Qwen2Config", "Qwen2ForCausalLM", dict(_COMMON, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    ),
    "qwen3": TinyTarget("Qwen3Config", "Qwen3ForCausalLM", _HEADS),
    "qwen3_moe": TinyTarget(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
    "mistral": TinyTarget("MistralConfig", "MistralForCausalLM", _WINDOW),
    "gemma2": TinyTarget(
        "Gemma2Config", "Gemma2ForCausalLM", dict(_UNTIED, query_pre_attn_scalar=8), attention=("eager",)
    ),
    # Five sliding layers, then a full one.
    "gemma3": TinyTarget(
        "Gemma3TextConfig", "Gemma3ForCausalLM", dict(_UNTIED, num_hidden_layers=6, query_pre_attn_scalar=8)
    ),
    "gpt_oss": TinyTarget(
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(_WINDOW, num_local_experts=4, num_experts_per_tok=2),
        attention=("eager",),
    ),
    "phi3": TinyTarget("Phi3Config", "Phi3ForCausalLM", dict(_COMMON, sliding_window=8)),
    "olmo2": TinyTarget("Olmo2Config", "Olmo2ForCausalLM", _COMMON),
    "granite": TinyTarget("GraniteConfig", "GraniteForCausalLM", _COMMON),
    "gpt2": TinyTarget(
        "GPT2Config",
        "GPT2LMHeadModel",
        dict(_TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.5),
    ),
    "gpt_neox": TinyTarget("GPTNeoXConfig", "GPTNeoXForCausalLM", _COMMON),
    "opt": TinyTarget(
        "OPTConfig",
        "OPTForCausalLM",
        dict(
            _TOKENS,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            init_std=0.5,
            word_embed_proj_dim=32,
        ),
    ),
    # ALiBi builds its bias from columns, and GPT-Neo its window: no tree mask reaches them.
    "bloom": TinyTarget(
        "BloomConfig",
        "BloomForCausalLM",
        dict(_TOKENS, hidden_size=32, n_layer=3, n_head=4, initializer_range=0.3, tie_word_embeddings=False),
        attention=("eager",),
        trees=False,
    ),
    "gpt_neo": TinyTarget(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        dict(
            _TOKENS,
            hidden_size=32,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            num_heads=4,
            window_size=8,
            max_position_embeddings=256,
            initializer_range=0.5,
        ),
        attention=("eager",),
        trees=False,
    ),
}


@cache
def target(name: str, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    """The target `name`, float32, in eval mode; one object per process, not to be changed by a test."""
    tiny = TARGETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, tiny.config)(**tiny.settings)
        config._attn_implementation = attention or tiny.attention[0]
        return getattr(transformers, tiny.model)(config).eval()


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths, without the pad token 0."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """input_ids and attention_mask of a left-padded batch."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


@cache
def plain(name: str, attention: str | None = None, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Per prompt, plain generate's greedy output (prompt included), each row by itself and unpadded."""
    return [
        target(name, attention).generate(torch.tensor([row]), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        for row in prompts(lengths)
    ]
