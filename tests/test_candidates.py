"""Encoder-decoder targets: our drafters inside transformers' own assisted loop, and what that loop cannot do."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import ScriptedDrafter, adversary, mixed, oracle
from transformers import T5Config, T5ForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

import hf_specdraft
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter

NEW = 24


def tiny_t5() -> tuple[T5ForConditionalGeneration, torch.Tensor]:
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
        initializer_factor=20.0,
    )
    return T5ForConditionalGeneration(config).eval(), torch.tensor([[5, 9, 12, 33, 41, 7]])


def tiny_whisper() -> tuple[WhisperForConditionalGeneration, torch.Tensor]:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=64,
        init_std=0.5,
        decoder_start_token_id=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = WhisperForConditionalGeneration(config).eval()
    # With any assistant Whisper's generate drops these, so plain must not have them either.
    model.generation_config.begin_suppress_tokens = None
    return model, torch.randn(1, 8, 100)


# Whisper's generate leaves out the decoder's start token.
TARGETS = {"t5": (tiny_t5, []), "whisper": (tiny_whisper, [1])}


def plain_and_answer(name: str):
    """The target, its input, plain's output, and the decoder row a scripted drafter works from."""
    build, start = TARGETS[name]
    model, inputs = build()
    with torch.no_grad():
        plain = model.generate(inputs, max_new_tokens=NEW, do_sample=False)
    row = start + plain[0].tolist()
    assert len(set(row)) > 5, "the fixture's answer is too dull to prove anything"
    return model, inputs, plain, row


def counter(module: torch.nn.Module) -> list:
    calls: list = []
    module.register_forward_hook(lambda *args: calls.append(1))
    return calls


@pytest.mark.parametrize("script", [oracle(4), adversary, mixed(4)], ids=["oracle", "adversary", "mixed"])
@pytest.mark.parametrize("name", TARGETS)
def test_scripted_drafter_equals_plain(name, script):
    model, inputs, plain, answer = plain_and_answer(name)
    drafter = ScriptedDrafter([answer], [script], 4, tree=True)  # asked for chains, whatever it could do
    assert torch.equal(model.generate(inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter), plain)


@pytest.mark.parametrize("name", TARGETS)
def test_encoder_runs_once_and_an_oracle_needs_few_passes(name):
    model, inputs, plain, answer = plain_and_answer(name)
    encoder, decoder = counter(model.get_encoder()), counter(model.get_decoder())
    drafter = ScriptedDrafter([answer], [oracle(4)], 4)
    assert torch.equal(model.generate(inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter), plain)
    assert len(encoder) == 1
    assert len(decoder) == math.ceil(NEW / 5)


@pytest.mark.parametrize("name", TARGETS)
def test_ngram_equals_plain(name):
    model, inputs, plain, _ = plain_and_answer(name)
    drafter = NgramDrafter(NgramConfig.tiny())
    assert torch.equal(model.generate(inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter), plain)


def test_processors_and_end_token_hold():
    model, inputs, _, answer = plain_and_answer("t5")
    settings = dict(max_new_tokens=NEW, do_sample=False, repetition_penalty=1.5, eos_token_id=answer[3])
    with torch.no_grad():
        plain = model.generate(inputs, **settings)
    drafter = ScriptedDrafter([answer], [oracle(6)], 6)
    assert torch.equal(model.generate(inputs, **settings, assistant_model=drafter), plain)


def test_length_asked_for_is_obeyed():
    model, inputs, _, answer = plain_and_answer("t5")
    decoder = counter(model.get_decoder())
    drafter = ScriptedDrafter([answer], [oracle(20)], 20)
    model.generate(inputs, max_new_tokens=NEW, do_sample=False, assistant_model=drafter, num_assistant_tokens=2)
    assert len(decoder) == NEW // 3


class Never:
    def __call__(self, ids, scores, **kwargs):
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(inputs=torch.tensor([[5, 9], [3, 4]])), "takes one row, not 2"),
        (dict(num_return_sequences=2, do_sample=True), "num_return_sequences must be 1"),
        (dict(num_beams=2), "num_beams=2"),
        (dict(stopping_criteria=[Never()]), "Never only about the last token"),
        (dict(assistant_model="block"), "reads the target's hidden states"),
        (dict(custom_generate="ours"), "as assistant_model="),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_limits_are_refused(change, words):
    model, inputs = tiny_t5()
    drafter = NgramDrafter(NgramConfig.tiny())
    arguments = dict(inputs=inputs, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    arguments.update(change)
    if arguments["assistant_model"] == "block":
        arguments["assistant_model"] = BlockDrafter(BlockConfig.tiny())
    if arguments.pop("custom_generate", None):
        arguments["custom_generate"] = hf_specdraft.speculate(arguments.pop("assistant_model"))
    decoder = counter(model.get_decoder())
    with pytest.raises(ValueError, match=words):
        model.generate(**arguments)
    assert not decoder
