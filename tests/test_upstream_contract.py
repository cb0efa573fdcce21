"""What this package assumes of transformers 5.24 beyond its documented interface, one test each.

A failing test names the file that must be revisited before the supported versions are widened (integration.py).
"""

from __future__ import annotations

import inspect

import pytest
import torch
from conftest import ScriptedDrafter, adversary, tiny_llama
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin, GenerationMode

from hf_specdraft import integration, sampling
from hf_specdraft.candidates import DraftCandidates

IDS = torch.tensor([[5, 9, 2, 33, 41, 7]])


def upstream(name: str):
    return inspect.unwrap(getattr(GenerationMixin, name))


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def gemma3(attention: str = "sdpa", seed: int = 0) -> Gemma3ForCausalLM:
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.5,
        attn_implementation=attention,
    )
    return Gemma3ForCausalLM(config).eval()


# The doorway --------------------------------------------------------------------------------------------------------


def test_routed_methods():
    """integration.py replaces these three by name and passes their arguments on by name: a rename would leave our
    drafters to upstream's loop, a new argument would be lost."""
    assert parameters(upstream("_validate_generation_mode")) == [
        "self",
        "generation_mode",
        "generation_config",
        "generation_mode_kwargs",
    ]
    assert parameters(upstream("_assisted_decoding")) == [
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "inputs_tensor",
        "assistant_model",
        "assistant_tokenizer",
        "tokenizer",
        "model_kwargs",
    ]
    assert parameters(upstream("_get_candidate_generator")) == [
        "self",
        "generation_config",
        "input_ids",
        "inputs_tensor",
        "logits_processor",
        "model_kwargs",
        "assistant_model",
        "target_tokenizer",
        "assistant_tokenizer",
    ]


def test_assisted_mode_reaches_the_routed_loop_by_name():
    """generate finds the loop as an attribute of the model's class: were it bound elsewhere, ours would never run."""
    assert GENERATION_MODES_MAPPING[GenerationMode.ASSISTED_GENERATION] == "_assisted_decoding"


@pytest.mark.parametrize("beams", [1, 2])
def test_validation_sees_the_assistant_before_any_work(monkeypatch, beams):
    """Our refusals sit in _validate_generation_mode. They must come before the first target pass, and in every mode:
    with beams upstream drops an assistant silently, and we refuse there."""
    seen, model = [], tiny_llama()
    monkeypatch.setattr(
        type(model),
        "_validate_generation_mode",
        lambda self, mode, config, kwargs: seen.append(kwargs["assistant_model"]),
        raising=False,
    )
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: pytest.fail("the target ran before validation"))
    monkeypatch.setattr(type(model), "_validate_model_kwargs", lambda self, kwargs: None, raising=False)
    drafter = ScriptedDrafter([[1]], [adversary], 2)

    class Stop(Exception):
        pass

    def stop(*args, **kwargs):
        raise Stop

    monkeypatch.setattr(type(model), "_prepare_model_inputs", stop, raising=False)
    with pytest.raises(Stop):
        model.generate(IDS, assistant_model=drafter, num_beams=beams, max_new_tokens=2)
    assert seen == [drafter]


def test_custom_generate_receives_what_speculate_expects():
    """speculate() returns a callable with these arguments; transformers must call it with them by name."""
    model, got = tiny_llama(), {}

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **kwargs):
        got.update(kwargs, processors=logits_processor, criteria=stopping_criteria, config=generation_config)
        return input_ids

    assert model.generate(IDS, custom_generate=loop, max_new_tokens=2) is not None
    assert isinstance(got["cache"], DynamicCache) and got["use_cache"] is True
    assert isinstance(got["criteria"], sc.StoppingCriteriaList) and isinstance(
        got["processors"], lp.LogitsProcessorList
    )
    assert got["config"].max_length == IDS.shape[1] + 2


def test_merged_defaults_of_the_assistant_settings():
    """policies.Settings counts a value equal to upstream's merged default as unset, so that the drafter's own config
    decides. Were the defaults no longer merged, or other ones, drafts would silently get upstream's length."""
    defaults = GenerationConfig._get_default_generation_params()
    assert GenerationConfig().num_assistant_tokens is None
    assert {name: defaults[name] for name in ("num_assistant_tokens", "num_assistant_tokens_schedule")} == {
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
    }
    assert defaults["assistant_confidence_threshold"] == 0.4
    merged = tiny_llama()._prepare_generation_config(None)[0]
    assert (merged.num_assistant_tokens, merged.assistant_confidence_threshold) == (20, 0.4)
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight", "use_mtp"):
        assert not getattr(merged, name)  # integration._CONFLICTS refuses whatever is set
    assert set(integration._CONFLICTS) <= set(vars(merged))


def test_prefill_and_loop_helpers():
    """target.py and decoding.py call these as upstream's own loops do; without one, prefill (chunks, handed-back
    caches, images), compiled decoding, expert switching or synchronised ranks would break."""
    assert parameters(upstream("_prefill"))[:4] == ["self", "input_ids", "generation_config", "model_kwargs"]
    assert parameters(upstream("_has_unfinished_sequences")) == ["self", "this_peer_finished", "synced_gpus", "device"]
    assert parameters(upstream("_valid_auto_compile_criteria")) == ["self", "model_kwargs", "generation_config"]
    assert parameters(tiny_llama().get_compiled_call) == ["compile_config"]
    with tiny_llama()._optimize_model_for_decode():
        pass


def test_continuing_inputs_are_cut_by_next_sequence_length():
    """target.score hands prepare_inputs_for_generation exactly the pass's ids, positions and a full-length mask."""
    model = tiny_llama()
    inputs = model.prepare_inputs_for_generation(
        IDS, next_sequence_length=6, is_first_iteration=False, position_ids=torch.arange(6)[None], cache=DynamicCache()
    )
    assert torch.equal(inputs["input_ids"], IDS) and torch.equal(inputs["position_ids"], torch.arange(6)[None])


# Hidden states ------------------------------------------------------------------------------------------------------


def test_hidden_states_by_index():
    """features.py asks for hidden states as a list of indices and finds each at its own index, None elsewhere: 0 is the
    embedding's output, i + 1 what layer i gives, and the last one stands behind the final norm."""
    model = tiny_llama()
    taken = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, args, out, i=i: taken.__setitem__(i, out))
    with torch.no_grad():
        everything = model(IDS, output_hidden_states=True).hidden_states
        some = model(IDS, output_hidden_states=[1]).hidden_states
        last = model.model.norm(taken[1])
    assert len(everything) == 3
    assert some[0] is None and torch.equal(some[1], everything[1]) and some[2] is None
    assert torch.equal(everything[0], model.get_input_embeddings()(IDS))
    assert torch.equal(everything[1], taken[0])
    torch.testing.assert_close(everything[2], last)


# Masks --------------------------------------------------------------------------------------------------------------


def causal(width: int) -> torch.Tensor:
    return torch.ones(1, 1, width, width, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "attention, kind, exact", [("sdpa", "bool", True), ("eager", "bool", False), ("eager", "float", True)]
)
def test_four_dimensional_masks(attention, kind, exact):
    """target._TreeMask: SDPA takes a boolean mask; eager attention adds its mask, so there a boolean one is wrong
    without an error and a float one right."""
    model = tiny_llama(attn_implementation=attention)
    mask = causal(6)
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        difference = (model(IDS, attention_mask=mask).logits - model(IDS).logits).abs().max()
    assert (difference < 1e-4) == exact


def test_masks_by_layer_type():
    """Models of mixed layers take a dict of masks by layer type; each layer must get its own, or a tree's window would
    be wrong in half of the layers."""
    model = gemma3()
    width = torch.arange(6)
    window = causal(6) & (width[:, None] - width[None, :] < 4)
    with torch.no_grad():
        plain = model(IDS).logits
        given = model(IDS, attention_mask={"full_attention": causal(6), "sliding_attention": window}).logits
        swapped = model(IDS, attention_mask={"full_attention": window, "sliding_attention": causal(6)}).logits
    torch.testing.assert_close(given, plain)
    assert (swapped - plain).abs().max() > 1e-2


def test_single_mask_of_a_windowed_model():
    """A model whose every layer has the same window takes one 4-D mask as it is, and adds no window to it."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=3,
        initializer_range=0.5,
    )
    model = MistralForCausalLM(config).eval()
    full, width = causal(6), torch.arange(6)
    window = full & (width[:, None] - width[None, :] < 3)
    with torch.no_grad():
        plain = model(IDS).logits
        torch.testing.assert_close(model(IDS, attention_mask=window).logits, plain)
        assert (model(IDS, attention_mask=full).logits - plain).abs().max() > 1e-2


# Caches -------------------------------------------------------------------------------------------------------------


def states(columns: int, start: int = 0) -> torch.Tensor:
    """[1, 2, columns, 4], every entry the number of its column."""
    return torch.arange(start, start + columns).float().view(1, 1, -1, 1).expand(1, 2, -1, 4).clone()


def columns_of(layer) -> list[int]:
    return layer.keys[0, 0, :, 0].int().tolist()


def test_dynamic_layer():
    """cache.py rearranges keys and values in place: [rows, heads, columns, head size], the length read off them; crop
    takes the number to remove as a negative count and refuses a positive one."""
    layer = DynamicLayer()
    layer.update(states(5), states(5))
    assert layer.keys.shape == layer.values.shape == (1, 2, 5, 4) and layer.get_seq_length() == 5
    layer.keys, layer.values = layer.keys[:, :, :4], layer.values[:, :, :4]
    assert layer.get_seq_length() == 4
    layer.crop(-1)
    assert columns_of(layer) == [0, 1, 2]
    layer.crop(0)
    assert columns_of(layer) == [0, 1, 2]
    with pytest.raises(ValueError):
        layer.crop(2)


def test_dynamic_window_layer():
    """cache.py relies on: window - 1 stored columns, the true length in cumulative_length, and record_past keeping what
    a draft pushed out until crop, where crop(0) trims as well."""
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.update(states(6), states(6))
    assert columns_of(layer) == [3, 4, 5] and layer.cumulative_length == layer.get_seq_length() == 6
    layer.activate_past_recording()
    assert layer.record_past is True
    layer.update(states(3, 6), states(3, 6))
    assert columns_of(layer) == [3, 4, 5, 6, 7, 8] and layer.get_mask_sizes(1) == (4, 6)
    layer.crop(-2)
    assert columns_of(layer) == [4, 5, 6] and layer.cumulative_length == 7
    layer.update(states(2, 7), states(2, 7))
    layer.crop(0)
    assert columns_of(layer) == [6, 7, 8] and layer.cumulative_length == 9
    layer.record_past = False
    layer.update(states(1, 9), states(1, 9))
    assert columns_of(layer) == [7, 8, 9]


def test_static_layers():
    """cache.py writes into static layers in place and sets cumulative_length, a tensor; a window layer counts a second
    time in an int."""
    layer = StaticLayer(max_cache_len=8)
    layer.update(states(5), states(5))
    assert layer.keys.shape == (1, 2, 8, 4) and torch.is_tensor(layer.cumulative_length)
    assert int(layer.get_seq_length()) == 5
    kept = layer.keys
    layer.crop(-2)
    layer.update(states(1, 9), states(1, 9))
    assert layer.keys is kept and columns_of(layer)[:5] == [0, 1, 2, 9, 4] and int(layer.cumulative_length) == 4
    window = StaticSlidingWindowLayer(max_cache_len=8, sliding_window=8)
    window.update(states(5), states(5))
    assert window.cumulative_length_int == 5 and window.is_croppable
    assert not StaticSlidingWindowLayer(max_cache_len=8, sliding_window=4).is_croppable


def test_caches_of_a_model():
    """Layer kinds follow the config's layer types; `layers`, `is_croppable`, `activate_past_recording` and
    get_mask_sizes(width, layer) are what cache.py and target.py read of a cache."""
    config = gemma3().config
    cache = DynamicCache(config=config)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, DynamicLayer]
    assert cache.is_croppable
    cache.activate_past_recording()
    assert cache.layers[0].record_past is True
    with torch.no_grad():
        gemma3()(IDS, cache=cache, use_cache=True)
    assert cache.get_seq_length() == 6
    assert [cache.get_mask_sizes(2, layer) for layer in (0, 1)] == [(5, 3), (8, 0)]
    static = StaticCache(config=tiny_llama().config, max_cache_len=16)
    assert [type(layer) for layer in static.layers] == [StaticLayer, StaticLayer]


# Processors and criteria --------------------------------------------------------------------------------------------

# Handled by sampling.Scorer like a user's own class: shown each row in its place of a full batch.
GENERIC = {
    "PrefixConstrainedLogitsProcessor",  # has a branch of its own
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection",
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    # Rows come in pairs or channels: not for a causal LM's generate, which never builds them.
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
}


def test_every_logits_processor_is_classified():
    """sampling.py calls a processor once for all nodes, once per row, or in a full batch, by its class: a new class
    upstream must be looked at before it is trusted to any of these."""
    defined = {
        name
        for name, cls in vars(lp).items()
        if inspect.isclass(cls) and issubclass(cls, lp.LogitsProcessor) and cls is not lp.LogitsProcessor
    }
    kinds = [{cls.__name__ for cls in kind} for kind in (sampling.PREFIX_FREE, sampling.ROW_WISE, sampling.CALL_ORDER)]
    kinds.append(GENERIC)
    assert set().union(*kinds) == defined
    assert sum(map(len, kinds)) == len(defined), "a class is in two kinds"


@pytest.mark.parametrize("cls", sampling.PREFIX_FREE, ids=lambda cls: cls.__name__)
def test_prefix_free_processors_ignore_the_prefix(cls):
    """They are called with no ids at all and with all nodes of all rows as one batch."""
    made = {
        lp.TemperatureLogitsWarper: (0.7,),
        lp.TopKLogitsWarper: (5,),
        lp.TopPLogitsWarper: (0.8,),
        lp.TopHLogitsWarper: (0.5,),
        lp.MinPLogitsWarper: (0.1,),
        lp.TypicalLogitsWarper: (0.9,),
        lp.EpsilonLogitsWarper: (3e-2,),
        lp.EtaLogitsWarper: (3e-2,),
        lp.SuppressTokensLogitsProcessor: ([3, 7],),
    }
    processor, scores = cls(*made.get(cls, ())), torch.randn(6, 16)
    together = processor(None, scores.clone())
    apart = [processor(torch.full((1, i + 1), i), scores[i : i + 1].clone()) for i in range(6)]
    torch.testing.assert_close(together, torch.cat(apart))


def test_attributes_read_of_criteria_and_processors():
    """rows.Stops compares lengths and end tokens on the host, sampling.py wraps the constraint's function: these are
    the names it reads them by."""
    assert sc.MaxLengthCriteria(max_length=7).max_length == 7
    assert sc.EosTokenCriteria(eos_token_id=[3, 4]).eos_token_id.view(-1).tolist() == [3, 4]
    assert not hasattr(sc.MaxLengthCriteria(max_length=7), "eos_token_id")
    assert bool(sc.MaxTimeCriteria(max_time=0.0, initial_timestamp=0.0)(IDS, None)[0])

    def allowed(row, ids):
        return [1]

    assert lp.PrefixConstrainedLogitsProcessor(allowed, 1)._prefix_allowed_tokens_fn is allowed
    assert lp.RepetitionPenaltyLogitsProcessor(1.5).prompt_ignore_length is None
    assert lp.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=4).prompt_ignore_length == 4


def test_plain_generate_pads_only_when_a_criterion_knows_end_tokens():
    """rows.Stops mirrors it: without end tokens, rows that a criterion stopped run on until the last one stops."""
    source = inspect.getsource(upstream("_sample"))
    assert 'any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)' in source


def test_candidate_generator_interface():
    """DraftCandidates is handed to upstream's assisted loop, which calls exactly this."""
    assert issubclass(DraftCandidates, CandidateGenerator)
    wanted = {name for name in vars(CandidateGenerator) if not name.startswith("_")}
    assert wanted == {"requires_model_outputs", "get_candidates", "update_candidate_strategy"}
    assert wanted <= set(vars(DraftCandidates))
    for name in ("get_candidates", "update_candidate_strategy"):
        assert parameters(getattr(DraftCandidates, name)) == parameters(getattr(CandidateGenerator, name))
