"""Every refusal: one ValueError that names cause and remedy, before the target has done any work."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from conftest import ScriptedDrafter, oracle, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_specdraft
from hf_specdraft import AutoDrafter
from hf_specdraft.draft import Draft
from hf_specdraft.drafters.assistant import AssistantConfig, AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter

IDS = torch.tensor([[5, 9, 2, 33, 41, 7]])
PADDED = dict(input_ids=torch.tensor([[0, 0, 0], [5, 9, 2]]), attention_mask=torch.tensor([[0, 0, 0], [1, 1, 1]]))
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
SIZES |= dict(num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
ngram = NgramDrafter(NgramConfig.tiny())


@cache
def llama():
    return tiny_llama()


def block(**fields) -> BlockDrafter:
    return BlockDrafter(BlockConfig.tiny(**fields)).eval()


def asked(target=None, drafter=ngram, ids=IDS, **settings):
    """A call of generate with a drafter."""

    def call(folder):
        model = llama() if target is None else target()
        inputs = dict(input_ids=ids) if "input_ids" not in settings else {}
        hook = model.register_forward_pre_hook(lambda *args: pytest.fail("the target worked before the refusal"))
        try:
            model.generate(
                **inputs, **{"max_new_tokens": 4, "do_sample": False, "assistant_model": drafter, **settings}
            )
        finally:
            hook.remove()

    return call


def saved(drafter, change):
    """Loading a saved drafter whose files were changed: `change(config, tensors)` edits both in place."""

    def call(folder):
        drafter().save_pretrained(folder)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for loader in (AutoModel, drafter().__class__):
            with pytest.raises(ValueError):
                loader.from_pretrained(folder)
        AutoDrafter.from_pretrained(folder)

    return call


def assistant() -> AssistantDrafter:
    return AssistantDrafter(AssistantConfig.tiny())


def remembering() -> NgramDrafter:
    drafter = NgramDrafter(NgramConfig.tiny())
    drafter.set_corpus([[1, 2, 3]])
    return drafter


def written(config):
    """Loading a folder with this config.json and no weights."""

    def call(folder):
        (folder / "config.json").write_text(json.dumps(config))
        AutoDrafter.from_pretrained(folder)

    return call


def stateful(model_class, config_class, **settings):
    return lambda: model_class(config_class(**{**SIZES, **settings})).eval()


windowed = stateful(MistralForCausalLM, MistralConfig, sliding_window=8)
hybrid = stateful(
    Qwen3NextForCausalLM,
    Qwen3NextConfig,
    layer_types=["linear_attention", "full_attention"],
    head_dim=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
longrope = stateful(
    Phi3ForCausalLM,
    Phi3Config,
    max_position_embeddings=64,
    original_max_position_embeddings=8,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
        original_max_position_embeddings=8,
    ),
)


def unflagged():
    """A target whose cache says it cannot be cut back."""

    class Sticky(DynamicCache):
        is_croppable = False

    return dict(cache=Sticky(config=llama().config))


class Wayward(ScriptedDrafter):
    """Returns what it was not asked for."""

    def __init__(self, draft):
        super().__init__([IDS[0].tolist()], [oracle(2)], 2)
        self.draft = draft

    def start(self, view, batch):
        session = super().start(view, batch)
        session.propose = lambda context: self.draft
        return session


FORK = Draft(torch.tensor([[3, 4]]), torch.tensor([[-1, -1]]), torch.ones(1, 2, dtype=torch.bool))
SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2, 3])

# name: (call, words the message must contain: the cause, then the remedy where there is one)
CASES = {
    # The drafter does not fit the target.
    "hidden size": (
        asked(drafter=block(target_hidden_size=64)),
        ("hidden_size 64", "target has 32", "load the target"),
    ),
    "vocabulary": (asked(drafter=NgramDrafter(NgramConfig(vocab_size=512))), ("vocabulary of 512", "64", "load the")),
    "another tokenizer's vocabulary": (
        asked(lambda: tiny_llama(vocab=5000), NgramDrafter(NgramConfig(vocab_size=4800))),
        ("vocabulary of 4800", "5000", "tokenizer= and assistant_tokenizer="),
    ),
    "layer out of range": (asked(drafter=block(target_layer_ids=[0, 7])), ("layer 7", "layers 0 to 1", "load the")),
    "negative layer": (asked(drafter=block(target_layer_ids=[-2])), ("layer -2", "layers 0 to 1", "load the target")),
    "last layer": (asked(drafter=block(target_layer_ids=[1])), ("layer 1", "after the final norm", "earlier layers")),
    "another depth": (asked(drafter=block(num_target_layers=9)), ("target of 9 layers", "has 2", "load the target")),
    "mask token": (
        asked(
            lambda: tiny_llama(vocab=60),
            block(own_embeddings=False, own_head=False, draft_vocab_size=None),
        ),
        ("mask_token_id 63", "60", "load the target"),
    ),
    # The drafter's files.
    "missing tensor": (saved(block, lambda c, t: t.pop("norm.weight")), ("missing", "norm.weight", "complete copy")),
    "tensor left over": (
        saved(block, lambda c, t: t.update(extra=torch.ones(2))),
        ("unexpected", "extra", "complete copy"),
    ),
    "tensor shape": (
        saved(block, lambda c, t: t.update({"norm.weight": torch.ones(5)})),
        ("mismatched", "norm.weight", "complete copy"),
    ),
    "NaN weights": (
        saved(block, lambda c, t: t["norm.weight"].fill_(float("nan"))),
        ("not finite", "norm.weight", "complete copy"),
    ),
    "assistant, missing tensor": (
        saved(assistant, lambda c, t: t.pop("model.model.norm.weight")),
        ("missing", "model.model.norm.weight", "complete copy"),
    ),
    "assistant, tensor left over": (
        saved(assistant, lambda c, t: t.update(extra=torch.ones(2))),
        ("unexpected", "extra", "complete copy"),
    ),
    "assistant, NaN weights": (
        saved(assistant, lambda c, t: t["model.lm_head.weight"].fill_(float("nan"))),
        ("not finite", "model.lm_head.weight", "complete copy"),
    ),
    "corpus missing": (
        saved(remembering, lambda c, t: (t.pop("corpus"), t.update(extra=torch.ones(2)))),
        ("missing: corpus", "unexpected: extra", "complete copy"),
    ),
    "corpus of another size": (
        saved(remembering, lambda c, t: t.update(corpus=torch.ones(9, dtype=torch.int32))),
        ("mismatched", "corpus", "complete copy"),
    ),
    "unknown config key": (
        saved(block, lambda c, t: c.update(selector_rank=4)),
        ("BlockConfig has no field selector_rank", "correct the name"),
    ),
    "misspelt setting": (lambda folder: NgramConfig(max_dept=3), ("NgramConfig has no field max_dept",)),
    "unknown dialect": (
        written(dict(model_type="qwen3", architectures=["WonderDraftModel"])),
        ("no drafter this package can read", "WonderDraftModel", "families: "),
    ),
    "broken config": (
        lambda folder: (folder / "config.json").write_text("{") and AutoDrafter.from_pretrained(folder),
        ("config.json is not valid JSON", "complete copy"),
    ),
    "an ordinary model": (
        written(dict(model_type="llama", architectures=["LlamaForCausalLM"])),
        ("no drafter this package can read", "LlamaForCausalLM", "families: "),
    ),
    # The drafter's own settings.
    "config length 0": (lambda folder: NgramConfig(num_assistant_tokens=0), ("num_assistant_tokens", "at least 1")),
    "config length above the block": (lambda folder: BlockConfig.tiny(num_assistant_tokens=9), ("9", "than the 3")),
    "tree_nodes": (lambda folder: NgramConfig(tree_nodes=-1), ("tree_nodes", "-1", "0 drafts chains")),
    "policy": (lambda folder: NgramConfig(policy="eager"), ("policy", "one of auto, fixed", "'eager'")),
    "scoring": (lambda folder: NgramConfig(scoring="best"), ("scoring", "'blend' or 'suffix'", "'best'")),
    "probability": (lambda folder: NgramConfig(min_prob=1.5), ("min_prob is a probability", "1.5")),
    "assistant without a model": (lambda folder: AssistantDrafter(AssistantConfig()), ("from_model",)),
    "encoder-decoder assistant": (
        lambda folder: AssistantDrafter.from_model(
            T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
        ),
        ("T5ForConditionalGeneration", "decoder-only"),
    ),
    # The request.
    "length 0": (asked(num_assistant_tokens=0), ("num_assistant_tokens is 0", "at least 1", "leave assistant_model")),
    "length negative": (asked(num_assistant_tokens=-3), ("num_assistant_tokens is -3", "at least 1")),
    "schedule": (asked(num_assistant_tokens_schedule="linear"), ("'linear'", "'constant' or 'heuristic'")),
    "confidence": (asked(assistant_confidence_threshold=1.5), ("assistant_confidence_threshold", "1.5", "0 and 1")),
    "empty prompt": (asked(ids=torch.zeros(1, 0, dtype=torch.long)), ("empty", "at least one token")),
    "all-padding row": (asked(**PADDED), ("rows [0]", "all padding", "drop them")),
    "beams": (asked(num_beams=2), ("num_beams=2", "beam_search", "num_beams=1")),
    "contrastive search": (
        asked(penalty_alpha=0.6, top_k=4, trust_remote_code=True),
        ("penalty_alpha=0.6", "contrastive_search", "leave assistant_model"),
    ),
    "no cache": (asked(use_cache=False), ("rewinds the cache", "use_cache at True")),
    "prompt lookup": (asked(prompt_lookup_num_tokens=3), ("prompt_lookup_num_tokens", "NgramDrafter", "drop it")),
    "n-gram size": (asked(max_matching_ngram_size=2), ("max_matching_ngram_size", "NgramConfig has its own")),
    "early exit": (asked(assistant_early_exit=1), ("assistant_early_exit", "drop it")),
    "mtp": (asked(use_mtp=True), ("use_mtp", "drop it")),
    "ensemble": (asked(assistant_ensemble_weight=0.5), ("assistant_ensemble_weight", "law", "lossless")),
    "speculation type": (asked(speculation_type="dflash"), ("speculation_type", "our drafters bring their own")),
    "stop strings": (asked(stop_strings=["x"]), ("stop strings", "tokenizer")),
    "watermark in a batch": (
        asked(ids=IDS.expand(2, -1), do_sample=True, watermarking_config=SYNTHID),
        ("SynthIDTextWatermarkLogitsProcessor", "from call to call", "one row at a time"),
    ),
    "guidance in a batch": (
        asked(ids=IDS.expand(2, -1), guidance_scale=1.5),
        ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "from call to call", "one row at a time"),
    ),
    # The target and its cache.
    "recurrent target": (
        asked(lambda: MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)).eval()),
        ("MambaForCausalLM", "cannot be rewound", "without assistant_model"),
    ),
    "hybrid target": (asked(hybrid), ("Qwen3NextForCausalLM", "cannot be rewound", "without assistant_model")),
    "quantised cache": (
        asked(cache_implementation="quantized", cache_config=dict(backend="fp8")),
        ("Fp8QuantizedLayer", "cannot be cut back", "cache_implementation=None"),
    ),
    "static cache beyond a window": (
        asked(windowed, cache_implementation="static", max_new_tokens=20),
        ("StaticSlidingWindowLayer", "cannot be cut back", "cache_implementation=None"),
    ),
    "cache that cannot be cut": (asked(**unflagged()), ("cannot be cut back", "without assistant_model")),
    "longrope crossing": (asked(longrope, max_new_tokens=8), ("at 8 tokens", "max_length (now 14)", "at or below 8")),
    # speculate().
    "no drafter": (lambda folder: hf_specdraft.speculate(llama()), ("takes a drafter", "LlamaForCausalLM")),
    "speculate, stop strings": (
        lambda folder: hf_specdraft.speculate(ngram, stop_strings=["x"]),
        ("stop_strings", "tokenizer=..."),
    ),
    "speculate, beams": (
        asked(assistant_model=None, custom_generate=hf_specdraft.speculate(ngram), num_beams=2),
        ("num_beams=2", "num_beams=1"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_before_any_work(name, tmp_path):
    call, words = CASES[name]
    with pytest.raises(ValueError) as error:
        call(tmp_path)
    for word in words:
        assert word in str(error.value)


def test_what_longrope_does_not_cross_is_served():
    model = longrope()
    plain = model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=2, do_sample=False, assistant_model=ngram), plain)


@pytest.mark.parametrize(
    "draft, words",
    [
        (FORK, "returned a tree, but this target or cache takes chains only"),
        (Draft.chain(torch.ones(1, 9, dtype=torch.long), [9]), "returned 9 nodes a row, but context.nodes is 2"),
    ],
    ids=["tree for a chain", "too many nodes"],
)
def test_drafters_that_break_their_contract(draft, words):
    """Known only when they draft; the call ends there rather than with a wrong text."""
    with pytest.raises(ValueError, match=words):
        llama().generate(IDS, max_new_tokens=8, do_sample=False, assistant_model=Wayward(draft))


@pytest.mark.parametrize("where", ["empty", "absent"])
def test_a_folder_without_config(tmp_path, where):
    folder = tmp_path if where == "empty" else tmp_path / "nothing" / "here"
    with pytest.raises(OSError, match="holds no config.json" if where == "empty" else "nothing"):
        AutoDrafter.from_pretrained(folder)
