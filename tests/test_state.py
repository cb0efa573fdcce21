"""A call leaves nothing behind: not in drafters, targets, configs or transformers, however it ends."""

from __future__ import annotations

import copy
import gc
import threading
import time
import tracemalloc

import pytest
import targets
import torch
from conftest import ScriptedDrafter, adversary, mixed, oracle, tiny_llama
from scripted import Recording, new_tokens, prompts, scripted
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, StoppingCriteria

from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter

K = 4
FAMILIES = ["ngram", "assistant", "block"]


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def drafter_of(family: str, **fields):
    torch.manual_seed(3)
    if family == "ngram":
        return NgramDrafter(NgramConfig.tiny(**{"policy": "fixed", **fields}))
    if family == "assistant":
        # The target's own weights: everything is accepted, unless its state is wrong.
        return AssistantDrafter.from_model(tiny_llama(), **{"policy": "fixed", **fields})
    return BlockDrafter(BlockConfig.tiny(initializer_range=0.2, **{"policy": "fixed", **fields})).eval()


def state_of(*models) -> list:
    """Everything a call could leave on modules: attributes, hooks, modes, configs, weights."""
    seen = []
    for model in models:
        for name, module in model.named_modules():
            kept = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
            seen.append((name, sorted(kept), module.training, len(module._forward_hooks)))
        seen.append(copy.deepcopy(model.config.to_dict()))
        if getattr(model, "generation_config", None) is not None:
            seen.append(copy.deepcopy(model.generation_config.to_dict()))
        seen += [(k, v.sum().item(), v.data_ptr()) for k, v in model.state_dict().items()]
    return seen


# call after call ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("between", ["nothing", "exception"])
def test_one_drafter_serves_call_after_call(target, family, between):
    drafter = drafter_of(family)
    calls = [torch.tensor([row]) for row in targets.prompts((8, 5, 11))]
    settings = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    gained = []
    for ids in (*calls, calls[0]):
        out = target.generate(ids, assistant_model=drafter, **settings)
        assert torch.equal(out.sequences, target.generate(ids, max_new_tokens=24, do_sample=False))
        gained.append((out.speculation.rounds, out.speculation.offered_by_depth, out.speculation.accepted_by_depth))
        if between == "exception":
            with pytest.raises(RuntimeError, match="half-way"):
                target.generate(ids, assistant_model=drafter, logits_processor=[FailAt(ids.shape[1] + 10)], **settings)
    assert gained[3] == gained[0]
    if family == "assistant":
        assert gained[0][1] == gained[0][2]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_threads_share_a_drafter(target, family):
    drafter = drafter_of(family)
    calls = [prompts(3), prompts(1), targets.padded(targets.prompts((6, 9), seed=5)), prompts(2)]
    settings = dict(max_new_tokens=20, do_sample=False)
    expected = [target.generate(**inputs, **settings) for inputs in calls]
    alone = [
        target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **settings) for inputs in calls
    ]
    results: dict[int, list] = {0: [], 1: []}

    def work(which: int):
        for inputs in calls[which::2] * 2:
            out = target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **settings)
            results[which].append(out)

    threads = [threading.Thread(target=work, args=(which,)) for which in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, outs in results.items():
        assert len(outs) == 4
        for out, plain, one in zip(outs, expected[which::2] * 2, alone[which::2] * 2):
            assert torch.equal(out.sequences, plain)
            assert out.speculation.rounds == one.speculation.rounds


# however it ends ------------------------------------------------------------------------------------------------------


class FailAt(LogitsProcessor, StoppingCriteria):
    """Raises when it is shown that many ids."""

    def __init__(self, length: int, error: type = RuntimeError):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise self.error("half-way")
        return scores if isinstance(scores, torch.Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


class FailingStop(FailAt):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__(input_ids, None)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingStreamer(Recording):
    def __init__(self, error: type):
        super().__init__()
        self.error = error

    def put(self, value):
        super().put(value)
        if len(self.puts) == 12:
            raise self.error("half-way")


def failing_call(place: str, error: type, drafter, prompt: int, monkeypatch) -> dict:
    """Arguments of a call that raises in the middle, at this place."""
    if place == "processor":
        return {"logits_processor": [FailAt(prompt + 10, error)]}
    if place == "criterion":
        return {"stopping_criteria": [FailingStop(prompt + 10, error)]}
    if place == "streamer":
        return {"streamer": FailingStreamer(error)}
    start = type(drafter).start

    def breaking(this, view, batch):
        session = start(this, view, batch)
        method, calls = getattr(session, place), []

        def fail(argument):
            calls.append(1)
            if len(calls) == 3:
                raise error("half-way")
            return method(argument)

        setattr(session, place, fail)
        return session

    monkeypatch.setattr(type(drafter), "start", breaking)
    return {}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["propose", "observe", "processor", "criterion", "streamer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_interrupted_call_leaves_everything_as_it_was(family, place, error, monkeypatch):
    target, drafter = targets.target("mistral"), drafter_of(family)
    inputs = prompts(2)
    config = GenerationConfig(max_new_tokens=24, do_sample=False, num_assistant_tokens=3, pad_token_id=0)
    settings = dict(assistant_model=drafter, generation_config=config, return_dict_in_generate=True)
    whole = target.generate(**inputs, **settings)
    caches = []
    prepare = type(target)._prepare_cache_for_generation

    def watched(*args, **kwargs):
        prepare(*args, **kwargs)
        caches.append(args[2]["cache"])

    before, mixin, given = state_of(target, drafter), dict(vars(GenerationMixin)), config.to_dict()
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "_prepare_cache_for_generation", watched)
        with pytest.raises(error, match="half-way"):
            target.generate(**inputs, **settings, **failing_call(place, error, drafter, 8, patch))
    assert state_of(target, drafter) == before
    assert dict(vars(GenerationMixin)) == mixin
    assert config.to_dict() == given
    assert len(caches) == 1 and caches[0].get_seq_length() > 0
    assert not any(getattr(layer, "record_past", False) for layer in caches[0].layers)
    again = target.generate(**inputs, **settings)
    assert torch.equal(again.sequences, whole.sequences)
    assert again.speculation.rounds == whole.speculation.rounds


# settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient"])
def test_configs_of_the_user_never_change(target, family, schedule):
    drafter = drafter_of(family, policy="auto")
    config = GenerationConfig(
        max_new_tokens=24,
        do_sample=False,
        num_assistant_tokens=2,
        num_assistant_tokens_schedule=schedule,
        assistant_confidence_threshold=0.3,
        pad_token_id=0,
    )
    before = [copy.deepcopy(c.to_dict()) for c in (config, target.generation_config, target.config, drafter.config)]
    for _ in range(2):
        target.generate(**prompts(2), assistant_model=drafter, generation_config=config)
    after = [c.to_dict() for c in (config, target.generation_config, target.config, drafter.config)]
    assert after == before


class Offered(ScriptedDrafter):
    """Notes the lengths it is asked for."""

    def start(self, view, batch):
        session, self.asked = super().start(view, batch), []
        propose = session.propose

        def noting(context):
            self.asked.append(max(context.lengths))
            return propose(context)

        session.propose = noting
        return session


def offered(target, script, **settings) -> tuple[list[int], torch.Tensor]:
    scripts = scripted(target, 1, [script])
    drafter = Offered(scripts.answers, scripts.script, 8)
    out = target.generate(**prompts(1), assistant_model=drafter, max_new_tokens=40, do_sample=False, **settings)
    return drafter.asked, out


@pytest.mark.parametrize("where", ["keyword", "generation_config", "model"])
def test_num_assistant_tokens_is_obeyed(target, where, monkeypatch):
    streamer = Recording()
    if where == "keyword":
        settings = {"num_assistant_tokens": 2}
    elif where == "generation_config":
        settings = {"generation_config": GenerationConfig(num_assistant_tokens=2, pad_token_id=0)}
    else:
        monkeypatch.setattr(target.generation_config, "num_assistant_tokens", 2)
        settings = {}
    asked, out = offered(target, oracle(8), streamer=streamer, **settings)
    assert set(asked) == {2}
    assert torch.equal(out, target.generate(**prompts(1), max_new_tokens=40, do_sample=False))


def test_without_the_setting_the_drafters_own_length_counts(target):
    """Upstream's merged default (20) is nobody's wish."""
    asked, _ = offered(target, oracle(8))
    assert set(asked[:-1]) == {8}


@pytest.mark.parametrize("value", [0, -1])
def test_senseless_length_is_refused(target, value):
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        offered(target, oracle(8), num_assistant_tokens=value)


def test_heuristic_schedule_is_upstreams_and_starts_anew_in_every_call(target):
    settings = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}
    asked, _ = offered(target, oracle(30), **settings)
    assert asked == [2, 4, 6, 8, 10, 3]  # +2 after every full acceptance; the last draft is cut to the 40 tokens
    assert offered(target, oracle(30), **settings)[0] == asked
    asked, _ = offered(target, adversary, **settings)
    assert asked == [2] + [1] * (len(asked) - 1)  # one less after a rejection, never below 1
    asked, _ = offered(target, lambda r: 30 if r % 3 else 0, **settings)
    expected = [2]
    for r in range(len(asked) - 2):
        expected.append(expected[-1] + 2 if r % 3 else max(1, expected[-1] - 1))
    assert asked[:-1] == expected
    with pytest.raises(ValueError, match="schedule"):
        offered(target, adversary, num_assistant_tokens_schedule="sometimes")


# masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["scripted", *FAMILIES])
@pytest.mark.parametrize("pad", [1, 2, 5, 7, 9])
def test_mask_omitted_all_ones_or_with_zeros(target, family, pad):
    """All give plain's text, in as many passes: the drafter's positions come from the mask."""
    ids = torch.tensor(targets.prompts((8,)))
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    drafter = ScriptedDrafter(plain.tolist(), [mixed(K)], K) if family == "scripted" else drafter_of(family)
    padded = torch.nn.functional.pad(ids, (pad, 0))
    forms = [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        {"input_ids": padded, "attention_mask": (torch.arange(8 + pad) >= pad).long()[None]},
    ]
    rounds = []
    for inputs in forms:
        out = target.generate(
            **inputs, assistant_model=drafter, max_new_tokens=20, do_sample=False, return_dict_in_generate=True
        )
        assert new_tokens(out.sequences, inputs) == plain[:, 8:].tolist()
        rounds.append((out.speculation.rounds, out.speculation.accepted_by_depth, out.speculation.offered_by_depth))
    assert rounds[0] == rounds[1] == rounds[2]


# memory and set-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_calls_keep_no_memory(target, family):
    drafter = drafter_of(family, policy="auto")
    inputs = prompts(1)
    held = {}
    tracemalloc.start()
    try:
        for call in range(1, 51):
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=4, do_sample=False)
            if call in (5, 50):
                held[call] = tracemalloc.get_traced_memory()[0], tensor_bytes()
    finally:
        tracemalloc.stop()
    assert held[50][0] - held[5][0] < 2**20
    assert held[50][1] - held[5][1] < 2**20


def tensor_bytes() -> int:
    """Memory of all living tensors, which tracemalloc does not see."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Tests of compiled targets leave fake tensors behind, which hold no memory; packed ones do not show theirs.
        if (
            type(thing) in (torch.Tensor, torch.nn.Parameter)
            and thing.device.type == "cpu"
            and thing.layout == torch.strided
        ):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_call_is_set_up_in_under_five_milliseconds(target, family):
    """What a call does beside passes of the target and of the drafter, for one token: the least of ten tries, in
    processor time so that a busy machine does not count."""
    drafter = drafter_of(family)
    ids = torch.tensor(targets.prompts((8,)))
    settings = dict(max_new_tokens=1, do_sample=False)

    def seconds(**assistant) -> float:
        begin = time.thread_time()
        target.generate(ids, **assistant, **settings)
        return time.thread_time() - begin

    seconds(assistant_model=drafter), seconds()
    plain = min(seconds() for _ in range(10))
    assert min(seconds(assistant_model=drafter) for _ in range(10)) - plain < 0.005
