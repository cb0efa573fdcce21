"""Caches: every kind is served exactly or refused by name, handed back as plain leaves it, and may be used again."""

from __future__ import annotations

import copy
import gc
import io
import random
import weakref

import pytest
import targets
import torch
import transformers
from conftest import ScriptedDrafter, adversary, mixed, oracle, tiny_llama
from scripted import prompts, scripted, scripts
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    Fp8QuantizedLayer,
    StaticLayer,
)

from hf_specdraft import decoding
from hf_specdraft.cache import RowCache
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter

K = 4
SCRIPTS = scripts(K)


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def any_target(request):
    return targets.target(request.param)


# kinds of caches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen2_sliding"])
@pytest.mark.parametrize(("attention", "prompt"), [("eager", 3), ("sdpa", 12)])
def test_texts_longer_than_the_sliding_window(name, script, tree, attention, prompt):
    any_target = targets.target(name, attention)
    ids = torch.randint(1, 64, (1, prompt))
    plain = any_target.generate(ids, max_new_tokens=40, do_sample=False)
    drafter = ScriptedDrafter(plain.tolist(), [SCRIPTS[script]], K, tree)
    out = any_target.generate(
        ids, assistant_model=drafter, max_new_tokens=40, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain)
    if script == "oracle":
        assert out.speculation.rounds == [8]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [2, 20])
def test_static_cache(llama, tree, batch, tokens):
    inputs = prompts(batch)
    drafter = scripted(llama, len(inputs["input_ids"]), [mixed(K), oracle(K), adversary], K, tree)
    settings = dict(max_new_tokens=tokens, do_sample=False, cache_implementation="static")
    plain = llama.generate(**inputs, **settings)
    assert torch.equal(llama.generate(**inputs, assistant_model=drafter, **settings), plain)
    out = llama.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, plain) and type(out.cache) is StaticCache


def test_static_cache_of_the_user_without_room_to_realign(llama):
    inputs = prompts(3)
    drafter = scripted(llama, len(inputs["input_ids"]), [mixed(K)])
    settings = dict(max_new_tokens=20, do_sample=False)
    cache = StaticCache(config=llama.config, max_cache_len=30)
    cache.early_initialization(3, 2, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match="max_cache_len"):
        llama.generate(**inputs, assistant_model=drafter, cache=cache, **settings)
    cache = StaticCache(config=llama.config, max_cache_len=31)
    cache.early_initialization(3, 2, 8, torch.float32, "cpu")
    out = llama.generate(**inputs, assistant_model=drafter, cache=cache, **settings)
    assert torch.equal(out, llama.generate(**inputs, **settings))


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("tokens", [3, 20])
def test_static_cache_of_a_windowed_target(name, tokens):
    """Equal while the text fits the window; otherwise refused, naming the setting."""
    target, inputs = (
        targets.target(name),
        {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4)},
    )
    settings = dict(max_new_tokens=tokens, do_sample=False, cache_implementation="static")
    plain = target.generate(**inputs, **settings)
    drafter = ScriptedDrafter(plain.tolist(), [mixed(K)], K)
    if tokens == 3:
        assert torch.equal(target.generate(**inputs, assistant_model=drafter, **settings), plain)
    else:
        with pytest.raises(ValueError, match="cache_implementation"):
            target.generate(**inputs, assistant_model=drafter, **settings)


RECURRENT = {
    "mamba": ("MambaConfig", "MambaForCausalLM", dict(hidden_size=32, state_size=4, num_hidden_layers=2)),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("script", ["oracle", "adversary"])
def test_recurrent_targets_are_refused(name, script):
    config, model, settings = RECURRENT[name]
    tokens = dict(vocab_size=64, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    target = getattr(transformers, model)(getattr(transformers, config)(**settings, **tokens)).eval()
    drafter = ScriptedDrafter([list(range(60))], [SCRIPTS[script]], K)
    with pytest.raises(ValueError, match="generate without assistant_model|recurrent"):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=6, do_sample=False)


class Uncuttable(DynamicLayer):
    is_croppable = False


@pytest.mark.parametrize("layer", [Uncuttable, Fp8QuantizedLayer])
def test_caches_that_cannot_be_cut_are_refused_before_any_draft(llama, layer):
    inputs = prompts(1)
    drafter = scripted(llama, len(inputs["input_ids"]), [oracle(K)])
    drafter.start = None  # never reached
    cache = Cache(layers=[layer() for _ in range(2)])
    with pytest.raises(ValueError, match=layer.__name__):
        llama.generate(**inputs, assistant_model=drafter, cache=cache, max_new_tokens=6, do_sample=False)


def test_model_that_turns_out_uncuttable_after_prefill_is_refused(llama, monkeypatch):
    """A cache that says so only once it holds something (LFM2's convolution state)."""
    monkeypatch.setattr(DynamicLayer, "is_croppable", property(lambda self: not self.is_initialized))
    inputs = prompts(1)
    drafter = ScriptedDrafter([list(range(60))], [oracle(K)], K)
    with pytest.raises(ValueError, match="cannot be cut back"):
        llama.generate(**inputs, assistant_model=drafter, max_new_tokens=6, do_sample=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloading a cache needs CUDA")
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_cache(kind):
    target, inputs = tiny_llama().cuda(), {name: t.cuda() for name, t in prompts(3).items()}
    drafter = scripted(target, len(inputs["input_ids"]), [mixed(K), oracle(K), adversary])
    settings = dict(max_new_tokens=20, do_sample=False, cache_implementation=kind)
    assert torch.equal(
        target.generate(**inputs, assistant_model=drafter, **settings), target.generate(**inputs, **settings)
    )


@pytest.mark.parametrize("size", [1, 4, 5])
def test_prefill_in_chunks(any_target, size):
    inputs = prompts(3)
    drafter = scripted(any_target, len(inputs["input_ids"]), [mixed(K), oracle(K), adversary])
    settings = dict(max_new_tokens=20, do_sample=False, prefill_chunk_size=size)
    plain = any_target.generate(**inputs, **settings)
    assert torch.equal(any_target.generate(**inputs, assistant_model=drafter, **settings), plain)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("everything", [False, True], ids=["own-layers", "output_hidden_states"])
def test_drafter_reads_every_chunk_of_the_prompt(any_target, size, turn, everything, monkeypatch):
    """Its features are those of a prefill in one piece; the caller's record is plain's."""
    drafter = families(any_target)["block"]
    inputs, kept = prompts(3), {}
    if turn == 2:
        first = any_target.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        inputs, kept = second_turn(inputs, first.sequences, ()), {"cache": first.cache}
    settings = dict(max_new_tokens=12, do_sample=False, output_hidden_states=everything, return_dict_in_generate=True)
    heard, start = [], type(drafter).start

    def listening(this, view, batch):
        session = start(this, view, batch)
        observe = session.observe
        session.observe = lambda commit: (heard.append(commit.features), observe(commit))
        return session

    monkeypatch.setattr(type(drafter), "start", listening)
    any_target.generate(**inputs, **copy.deepcopy(kept), assistant_model=drafter, **settings)
    whole = heard[0]
    heard.clear()
    settings["prefill_chunk_size"] = size
    out = any_target.generate(**inputs, **copy.deepcopy(kept), assistant_model=drafter, **settings)
    plain = any_target.generate(**inputs, **copy.deepcopy(kept), **settings)
    assert torch.equal(out.sequences, plain.sequences)
    assert (heard[0].counts, heard[0].start) == (whole.counts, whole.start)
    for mine, expected, count in zip(heard[0].hidden, whole.hidden, whole.counts):
        torch.testing.assert_close(mine[:count], expected[:count], atol=1e-4, rtol=1e-4)
    if everything:
        assert [states.shape for states in out.hidden_states[0]] == [s.shape for s in plain.hidden_states[0]]


# the cache handed back ------------------------------------------------------------------------------------------------


def live_states(cache, row: int, first: int, last: int):
    """Keys and values of the row's columns first..last (exclusive), as far as each layer holds them."""
    for layer in cache.layers:
        offset = cache.get_seq_length() - layer.keys.shape[-2]
        span = slice(max(first - offset, 0), max(last - offset, 0))
        yield layer.keys[row, :, span]
        yield layer.values[row, :, span]


@pytest.mark.parametrize("script", ["mixed", "uneven"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("batch", "user"), [(1, False), (4, False), (4, True)])
def test_cache_equals_plains_in_its_live_columns(any_target, script, tree, batch, user):
    inputs = prompts(batch)
    scripts = [mixed(K), oracle(K), adversary] if script == "uneven" else [SCRIPTS[script]]
    drafter = scripted(any_target, len(inputs["input_ids"]), scripts, K, tree)
    ends = [row[-48:][at] for row, at in zip(drafter.answers, (21, 6, 13, 9))]
    settings = dict(max_new_tokens=20, do_sample=False, eos_token_id=ends if batch > 1 else None)
    caches = []
    for assistant in ({}, {"assistant_model": drafter}):
        extra = {"cache": DynamicCache(config=any_target.config)} if user else {"return_dict_in_generate": True}
        out = any_target.generate(**inputs, **assistant, **settings, **extra)
        caches.append(extra["cache"] if user else out.cache)
    plain, mine = caches
    assert mine.get_seq_length() == plain.get_seq_length()
    assert [type(layer) for layer in mine.layers] == [type(layer) for layer in plain.layers]
    sequences = out if user else out.sequences
    width = inputs["input_ids"].shape[1]
    for row in range(batch):
        new = sequences[row, width:].tolist()
        length = next((i + 1 for i, token in enumerate(new) if token in (ends if batch > 1 else ())), len(new))
        first = int(inputs["attention_mask"][row].argmax())
        last = min(width + length, plain.get_seq_length())
        for ours, theirs in zip(live_states(mine, row, first, last), live_states(plain, row, first, last)):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for layer, theirs in zip(mine.layers, plain.layers):
        assert layer.keys.shape == theirs.keys.shape
        assert not getattr(layer, "record_past", False)


class Spy:
    """Records what a family's sessions draft, and how many were started."""

    def __init__(self, drafter, monkeypatch):
        self.drafts, self.started = [], 0
        start = type(drafter).start

        def spying(this, view, batch):
            session = start(this, view, batch)
            self.started += 1
            propose = session.propose

            def recording(context):
                draft = propose(context)
                self.drafts.append([t[v].tolist() for t, v in zip(draft.tokens, draft.valid)])
                return draft

            session.propose = recording
            return session

        monkeypatch.setattr(type(drafter), "start", spying)


def families(target) -> dict:
    torch.manual_seed(3)
    block = BlockConfig.tiny(initializer_range=0.2, policy="fixed")
    return {
        "ngram": NgramDrafter(NgramConfig.tiny(policy="fixed")),
        "assistant": AssistantDrafter.from_model(tiny_llama(seed=1), policy="fixed"),
        "block": BlockDrafter(block).eval(),
    }


FAMILIES = ["ngram", "assistant", "block"]


def second_turn(inputs, sequences, ends) -> dict:
    """The first turn's text, its padding masked, and a few tokens of a second question."""
    width = inputs["input_ids"].shape[1]
    live = torch.ones_like(sequences)
    live[:, :width] = inputs["attention_mask"]
    for row in range(len(sequences)):
        found = [i for i, token in enumerate(sequences[row, width:].tolist()) if token in ends]
        if found:
            live[row, width + found[0] + 1 :] = 0
    question = torch.randint(1, 64, (len(sequences), 5), generator=torch.Generator().manual_seed(7))
    return {
        "input_ids": torch.cat([sequences, question], 1),
        "attention_mask": torch.cat([live, torch.ones_like(question)], 1),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("batch", "ends_early"), [(1, False), (3, False), (3, True)])
def test_second_turn_drafts_as_well_as_the_first(any_target, family, batch, ends_early, monkeypatch):
    """A second turn on the handed-back cache: plain's text by plain generate and by speculation, whose session goes on
    and drafts what it would have drafted without any cache."""
    drafter = families(any_target)[family]
    inputs = prompts(batch)
    settings = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    free = any_target.generate(**inputs, **settings).sequences
    ends = [int(free[1, -11])] if ends_early else []
    first = any_target.generate(**inputs, assistant_model=drafter, eos_token_id=ends or None, **settings)
    turn = second_turn(inputs, first.sequences, ends)
    plain = any_target.generate(**turn, **settings).sequences
    by_plain = any_target.generate(**turn, cache=copy.deepcopy(first.cache), **settings)
    assert torch.equal(by_plain.sequences, plain)
    spy = Spy(drafter, monkeypatch)
    fresh = any_target.generate(**turn, assistant_model=drafter, **settings)
    expected, spy.drafts = spy.drafts, []
    session = decoding._SESSIONS[first.cache][0]
    propose = session.propose
    session.propose = lambda context: spied(propose(context))

    def spied(draft):
        spy.drafts.append([t[v].tolist() for t, v in zip(draft.tokens, draft.valid)])
        return draft

    again = any_target.generate(**turn, assistant_model=drafter, cache=first.cache, **settings)
    assert torch.equal(again.sequences, plain) and torch.equal(fresh.sequences, plain)
    assert spy.started == 1  # the fresh one only: the session on the cache went on
    assert spy.drafts == expected
    assert again.cache is first.cache and decoding._SESSIONS[again.cache][0] is session


def chat(target, drafter, ids=None):
    ids = torch.randint(1, 64, (1, 9), generator=torch.Generator().manual_seed(1)) if ids is None else ids
    return target.generate(
        ids, assistant_model=drafter, max_new_tokens=16, do_sample=False, return_dict_in_generate=True
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", ["drafter", "prompt", "plain turn between", "exception"])
def test_session_on_a_cache_is_not_reused_blindly(llama, family, change, monkeypatch):
    drafter = families(llama)[family]
    first = chat(llama, drafter)
    ids, cache = torch.cat([first.sequences, torch.tensor([[5, 9, 11]])], 1), first.cache
    if change == "drafter":
        drafter = families(llama)[family]
    elif change == "prompt":
        # The user takes back the end of the answer and goes on otherwise.
        cache.crop(-6)
        ids = torch.cat([first.sequences[:, : cache.get_seq_length() + 1], torch.tensor([[1, 2]])], 1)
    elif change == "plain turn between":
        ids = llama.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
        ids = torch.cat([ids, torch.tensor([[8, 8]])], 1)
    else:
        intact = copy.deepcopy(cache.layers)

        def fail(input_ids, scores):
            if input_ids.shape[1] > 34:
                raise RuntimeError("stop here")
            return scores

        with pytest.raises(RuntimeError, match="stop here"):
            llama.generate(
                ids, assistant_model=drafter, cache=cache, logits_processor=[fail], max_new_tokens=16, do_sample=False
            )
        cache.layers = intact
    spy = Spy(drafter, monkeypatch)
    out = llama.generate(
        ids, assistant_model=drafter, cache=cache, max_new_tokens=16, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, llama.generate(ids, max_new_tokens=16, do_sample=False))
    assert spy.started == (0 if change == "plain turn between" else 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copied_cache_brings_nothing_of_the_drafter_along(llama, family, how):
    """A copy holds tensors of the cache only; on it a new session starts, and the first one still goes on."""
    drafter = families(llama)[family]
    first = chat(llama, drafter)
    session = decoding._SESSIONS[first.cache][0]
    if how == "deepcopy":
        twin = copy.deepcopy(first.cache)
    else:
        file = io.BytesIO()
        torch.save(first.cache, file)
        states = sum(states.nbytes for layer in first.cache.layers for states in (layer.keys, layer.values))
        assert file.tell() < states + 10_000
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert set(vars(twin)) == set(vars(DynamicCache(config=llama.config)))
    ids = torch.cat([first.sequences, torch.tensor([[5, 9, 11]])], 1)
    settings = dict(assistant_model=drafter, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    plain = llama.generate(ids, max_new_tokens=16, do_sample=False)
    on_twin, on_first = (llama.generate(ids, cache=cache, **settings) for cache in (twin, first.cache))
    assert torch.equal(on_twin.sequences, plain) and torch.equal(on_first.sequences, plain)
    assert decoding._SESSIONS[twin][0] is not session and decoding._SESSIONS[first.cache][0] is session


@pytest.mark.parametrize("family", FAMILIES)
def test_session_goes_with_its_cache(llama, family):
    out = chat(llama, families(llama)[family])
    gone = weakref.ref(decoding._SESSIONS[out.cache][0])
    del out
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_prefix_reuse(any_target, family, batch):
    """A system prompt prefilled once, its cache copied into every call."""
    drafter = families(any_target)[family]
    system = torch.randint(1, 64, (1, 10)).expand(batch, -1)
    cache = DynamicCache(config=any_target.config)
    with torch.no_grad():
        any_target(system, cache=cache, use_cache=True)
    for seed in range(2):
        question = torch.randint(1, 64, (batch, 4), generator=torch.Generator().manual_seed(seed))
        ids = torch.cat([system, question], 1)
        plain = any_target.generate(ids, max_new_tokens=16, do_sample=False)
        mine = copy.deepcopy(cache)
        out = any_target.generate(ids, assistant_model=drafter, cache=mine, max_new_tokens=16, do_sample=False)
        assert torch.equal(out, plain)
        assert mine.get_seq_length() == ids.shape[1] + 15


def test_dynamic_cache_without_config(any_target):
    """Its layers are made on first use and keep everything, also for windowed targets."""
    inputs = prompts(3)
    drafter = scripted(any_target, len(inputs["input_ids"]), [mixed(K), oracle(K), adversary])
    cache = DynamicCache()
    out = any_target.generate(**inputs, assistant_model=drafter, cache=cache, max_new_tokens=20, do_sample=False)
    assert torch.equal(out, any_target.generate(**inputs, max_new_tokens=20, do_sample=False))
    assert cache.get_seq_length() == out.shape[1] - 1


def test_time_up_takes_the_session_off_when_it_knows_tokens_that_were_taken_back(llama, monkeypatch):
    inputs = prompts(3)
    drafter = scripted(llama, len(inputs["input_ids"]), [mixed(K), oracle(K), adversary])
    seconds = [0.0]
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: seconds[0])
    hook = llama.model.register_forward_hook(lambda *args: seconds.__setitem__(0, seconds[0] + 1))
    out = llama.generate(
        **inputs,
        assistant_model=drafter,
        max_time=3.5,
        max_new_tokens=40,
        do_sample=False,
        return_dict_in_generate=True,
    )
    hook.remove()
    assert out.sequences.shape[1] == 11 + 4  # the slowest row's
    assert out.cache.get_seq_length() == 11 + 3
    assert out.cache not in decoding._SESSIONS
    turn = second_turn(inputs, out.sequences, ())
    again = llama.generate(**turn, assistant_model=drafter, cache=out.cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(again, llama.generate(**turn, max_new_tokens=8, do_sample=False))


# RowCache against a naive model ---------------------------------------------------------------------------------------

WINDOW = 6


class NaiveRows:
    """What the cache should hold: per row a list of entries."""

    def __init__(self, lengths):
        self.rows = [[(b, i) for i in range(n)] for b, n in enumerate(lengths)]

    def commit(self, written, kept, rows):
        self.rows = [row + [w[k] for k in ks] for row, w, ks in zip(self.rows, written, kept)]
        if rows is not None:
            self.rows = [self.rows[b] for b in rows]


def states(entries) -> torch.Tensor:
    """[B, W] entries -> [B, 2 heads, W, 3]: the entry's numbers, told apart by head and sign (None is rubbish)."""
    flat = [[(-7.0, -7.0) if e is None else e for e in row] for row in entries]
    base = torch.tensor(flat, dtype=torch.float32)
    return torch.stack([torch.cat([base, base[..., :1] * 0 + h], -1) for h in range(2)], 1)


def check(rows: RowCache, naive: NaiveRows):
    assert rows.lengths == [len(row) for row in naive.rows]
    columns = rows.columns
    for layer in rows.cache.layers:
        assert layer.get_seq_length() == columns
        held = columns if isinstance(layer, StaticLayer) else layer.keys.shape[-2]
        if type(layer) is DynamicSlidingWindowLayer:
            assert held == min(columns, WINDOW - 1)
        for b, row in enumerate(naive.rows):
            shown = row[-held:]
            expected = states([shown])[0] if shown else torch.zeros(2, 0, 3)
            end = columns if isinstance(layer, StaticLayer) else held
            torch.testing.assert_close(layer.keys[b, :, end - len(shown) : end], expected)
            torch.testing.assert_close(layer.values[b, :, end - len(shown) : end], -expected)
    start = torch.tensor(rows.start)[:, None]
    visible = torch.arange(columns) >= start
    assert torch.equal(visible, torch.ones_like(visible) if rows.mask is None else rows.mask.bool())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
def test_commit_and_lay_out_against_lists(seed, kind):
    choose = random.Random(seed)
    batch = choose.randint(1, 5)
    lengths = [choose.randint(1, 9) for _ in range(batch)]
    columns = max(lengths)
    layers = {
        "dynamic": lambda: [DynamicLayer()],
        "sliding": lambda: [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)],
        "static": lambda: [StaticLayer(max_cache_len=120)],
    }[kind]()
    cache = Cache(layers=layers)
    naive = NaiveRows(lengths)

    def write(entries):
        for i in range(len(layers)):
            keys = states(entries)
            cache.update(keys, -keys, i)

    write([[None] * (columns - len(row)) + row for row in naive.rows])
    cache.activate_past_recording()
    mask = torch.tensor([[0] * (columns - n) + [1] * n for n in lengths])
    rows = RowCache(cache, batch, mask if min(lengths) < columns else None)
    first = list(rows.start)
    counter, alive = 1000, list(range(batch))
    for _ in range(choose.randint(1, 8)):
        width = choose.randint(1, 6)
        written = [[(counter + b, i) for i in range(width)] for b in range(len(naive.rows))]
        counter += 100
        write(written)
        even = choose.random() < 0.3
        count = choose.randint(1, width)
        kept = []
        for _ in naive.rows:
            n = count if even else choose.randint(0, width)
            kept.append([0] * bool(n) + sorted(choose.sample(range(1, width), n - 1) if n > 1 else []))
        keep = None
        if len(naive.rows) > 1 and choose.random() < 0.3 and kind != "static":
            keep = sorted(choose.sample(range(len(naive.rows)), len(naive.rows) - 1))
            alive, first = [alive[b] for b in keep], [first[b] for b in keep]
        rows.commit(width, kept, keep)
        naive.commit(written, kept, keep)
        check(rows, naive)
    # Back to columns that begin where they began: plain's layout.
    end = max(s + len(row) for s, row in zip(first, naive.rows))
    rows.lay_out(first, end)
    assert rows.columns == end == cache.get_seq_length()
    for layer in layers:
        offset = 0 if kind == "static" else end - layer.keys.shape[-2]
        for b, row in enumerate(naive.rows):
            span = [c for c in range(first[b], first[b] + len(row)) if c >= offset]
            expected = states([[row[c - first[b]] for c in span]])[0] if span else torch.zeros(2, 0, 3)
            torch.testing.assert_close(layer.keys[b][:, [c - offset for c in span]], expected)
            torch.testing.assert_close(layer.values[b][:, [c - offset for c in span]], -expected)


def test_holes_inside_rows_stay_masked(llama):
    """A right-padded row in the prompt: its zeros move with it."""
    ids = torch.randint(1, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, 5:8] = 0
    plain = llama.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    answers = [[t for t, m in zip(row, [*keep, *[1] * 20]) if m] for row, keep in zip(plain.tolist(), mask.tolist())]
    for tree in (False, True):
        drafter = ScriptedDrafter(answers, [mixed(K), oracle(K)], K, tree)
        out = llama.generate(
            ids,
            attention_mask=mask,
            assistant_model=drafter,
            max_new_tokens=20,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, plain)
        assert out.speculation.rounds[1] == 4  # the drafter was shown its own text, or the oracle would not have known
