"""What generate returns and streams: types, shapes, values and counts are plain's."""

from __future__ import annotations

import math
import threading

import pytest
import targets
import torch
from conftest import ScriptedDrafter, adversary, mixed, oracle, tiny_llama
from scripted import FREE, Recording, byte_tokenizer, new_tokens, prompts, scripted, scripts
from transformers import StoppingCriteria, TextIteratorStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdraft.draft import Draft

K = 4
TOKENS = 20
SCRIPTS = scripts(K)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3"])
def any_target(request):
    return targets.target(request.param, "eager")  # SDPA gives no attention weights


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


# records --------------------------------------------------------------------------------------------------------------

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def compare(out, plain, lengths, names=("scores", "logits", "hidden_states", "attentions")):
    """Every entry of every record has plain's shape, and plain's values in the rows that are still unfinished there."""
    assert torch.equal(out.sequences, plain.sequences)
    steps = len(plain.scores)
    for name in names:
        mine, theirs = getattr(out, name), getattr(plain, name)
        assert isinstance(mine, tuple) and len(mine) == len(theirs) == steps, name
        for step in range(steps):
            live = [b for b, length in enumerate(lengths) if step < length]
            pairs = [(mine[step], theirs[step])] if name in ("scores", "logits") else zip(mine[step], theirs[step])
            if name not in ("scores", "logits"):
                assert len(mine[step]) == len(theirs[step])
            for ours, expected in pairs:
                assert ours.shape == expected.shape, (name, step)
                assert ours.dtype == expected.dtype
                torch.testing.assert_close(ours[live], expected[live], atol=1e-4, rtol=1e-4, msg=f"{name} at {step}")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=["bare", "penalty"])
def test_records_are_plains(any_target, batch, tree, processors):
    inputs = prompts(batch)
    drafter = scripted(any_target, len(inputs["input_ids"]), [mixed(K), oracle(K), adversary], tree=tree)
    ends = [drafter.answers[1][-FREE + 5]] if batch > 1 else None
    settings = dict(max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends, **processors, **EVERYTHING)
    plain = any_target.generate(**inputs, **settings)
    out = any_target.generate(**inputs, assistant_model=drafter, **settings)
    lengths = []
    for row in new_tokens(plain.sequences, inputs):
        found = [i for i, token in enumerate(row) if token in (ends or ())]
        lengths.append(found[0] + 1 if found else len(row))
    assert batch == 1 or processors or min(lengths) < max(lengths)
    compare(out, plain, lengths)
    assert processors or sum(out.speculation.accepted_by_depth) > 0


@pytest.mark.parametrize("layers", [[0, 2], [2, 1], [-1], 1], ids=str)
def test_hidden_states_of_named_layers(target, layers):
    inputs = prompts(3)
    drafter = scripted(target, len(inputs["input_ids"]), [mixed(K), oracle(K), adversary])
    settings = dict(max_new_tokens=TOKENS, do_sample=False, output_hidden_states=layers, return_dict_in_generate=True)
    plain = target.generate(**inputs, **settings)
    out = target.generate(**inputs, assistant_model=drafter, **settings)
    assert out.scores is None and out.attentions is None
    assert len(out.hidden_states) == TOKENS
    for ours, theirs in zip(out.hidden_states, plain.hidden_states):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_records_under_sampling_are_those_of_the_returned_tokens(target):
    inputs = prompts(2)
    drafter = scripted(target, len(inputs["input_ids"]), [mixed(K)])
    out = target.generate(
        **inputs, assistant_model=drafter, do_sample=True, top_k=5, temperature=0.7, max_new_tokens=TOKENS, **EVERYTHING
    )
    # Feed the returned text to the target in one pass: its logits are the records.
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, TOKENS), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = target(out.sequences, attention_mask=mask, position_ids=positions).logits
    width = inputs["input_ids"].shape[1]
    for t in range(TOKENS):
        torch.testing.assert_close(out.logits[t], logits[:, width + t - 1], atol=1e-4, rtol=1e-4)
        assert (out.scores[t].isfinite().sum(-1) == 5).all()
        assert out.scores[t].gather(1, out.sequences[:, width + t, None]).isfinite().all()


class LastIs(StoppingCriteria):
    """Each row stops at its own token."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.tokens


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("stops", [(7, 3, 2), (3, 11, 5), (2, 2, 9)], ids=str)
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=["bare", "penalty"])
def test_rows_that_run_on_until_the_last_one_stops(target, tree, slow, stops, processors):
    """Without end tokens: what rows ahead of the last stop were given beyond it is nowhere to be seen."""
    inputs = prompts(3)
    ways = [oracle(K)] * 3
    ways[slow] = adversary
    drafter = scripted(target, 3, ways, tree=tree, penalty=processors.get("repetition_penalty", 1.0))
    free = [row[-FREE:] for row in drafter.answers]
    tokens = [row[stop - 1] for row, stop in zip(free, stops)]
    last = max(row.index(token) + 1 for row, token in zip(free, tokens))
    settings = dict(max_new_tokens=30, do_sample=False, stopping_criteria=[LastIs(tokens)], **processors, **EVERYTHING)
    settings["output_attentions"] = False
    plain = target.generate(**inputs, **settings)
    streamer = Recording()
    out = target.generate(**inputs, assistant_model=drafter, streamer=streamer, **settings)
    assert new_tokens(out.sequences, inputs) == [row[:last] for row in free]
    compare(out, plain, [last] * 3, ("scores", "logits", "hidden_states"))
    assert torch.equal(torch.tensor(streamer.puts[1:]).T, out.sequences[:, inputs["input_ids"].shape[1] :])
    gained = out.speculation
    assert gained.tokens == [last] * 3
    assert sum(last - 1 - r for r in gained.rounds) == gained.accepted == sum(gained.accepted_by_depth)


@pytest.mark.parametrize("end", [None, 0], ids=["no-end-token", "with-end-token"])
def test_records_when_time_is_up(target, end, monkeypatch):
    inputs = prompts(3)
    drafter = scripted(target, 3, [oracle(K), adversary, mixed(K)])
    seconds = [0.0]
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: seconds[0])
    hook = target.register_forward_hook(lambda *args: seconds.__setitem__(0, seconds[0] + 1))
    try:
        out = target.generate(
            **inputs,
            assistant_model=drafter,
            max_time=2.5,
            max_new_tokens=FREE,
            do_sample=False,
            eos_token_id=end,
            **EVERYTHING | {"output_attentions": False},
        )
    finally:
        hook.remove()
    tokens = [3, 3, 3] if end is None else [1 + 2 * (K + 1), 3, 4]  # prefill and two rounds
    assert out.speculation.tokens == tokens
    assert out.speculation.accepted == sum(tokens) - 3 - sum(out.speculation.rounds)
    assert out.sequences.shape[1] - inputs["input_ids"].shape[1] == max(tokens)
    plain = target.generate(
        **inputs, max_new_tokens=max(tokens), do_sample=False, **EVERYTHING | {"output_attentions": False}
    )
    for row, count in enumerate(tokens):
        assert new_tokens(out.sequences, inputs)[row][:count] == new_tokens(plain.sequences, inputs)[row][:count]
    for name in ("scores", "logits", "hidden_states"):
        assert len(getattr(out, name)) == max(tokens)


# types and counts -----------------------------------------------------------------------------------------------------


def test_return_types(target):
    inputs = prompts(2)
    drafter = scripted(target, len(inputs["input_ids"]), [oracle(K)])
    settings = dict(max_new_tokens=8, do_sample=False)
    plain = target.generate(**inputs, **settings)
    out = target.generate(**inputs, assistant_model=drafter, **settings)
    assert type(out) is type(plain) and out.dtype == plain.dtype and torch.equal(out, plain)
    out = target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **settings)
    plain = target.generate(**inputs, return_dict_in_generate=True, **settings)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert set(plain) <= set(out) <= {*plain, "speculation"}
    assert all(getattr(out, name) is None for name in ("scores", "logits", "hidden_states", "attentions"))
    assert type(out.cache) is type(plain.cache)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_speculation_adds_up(target, script, batch, tree):
    inputs = prompts(batch)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], tree=tree)
    # Whether the target takes trees is found out once, by passes of their own.
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=2, do_sample=False)
    passes = []
    hook = target.model.register_forward_hook(lambda *args: passes.append(args[-1].last_hidden_state.shape[0]))
    out = target.generate(
        **inputs, assistant_model=drafter, max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True
    )
    hook.remove()
    gained = out.speculation
    assert gained.tokens == [TOKENS] * batch
    assert max(gained.rounds) <= len(passes) - 1 <= max(gained.rounds) + (out.cache is not None)
    # Every token after the first is accepted or the target's own, one per round; the last round may be cut.
    assert sum(TOKENS - 1 - r for r in gained.rounds) == gained.accepted == sum(gained.accepted_by_depth)
    assert gained.offered_by_depth[0] <= sum(gained.rounds)
    assert all(a <= o for a, o in zip(gained.accepted_by_depth, gained.offered_by_depth))
    assert gained.offered_by_depth == sorted(gained.offered_by_depth, reverse=True)
    assert gained.accepted <= gained.verified <= gained.drafted
    assert gained.tau == pytest.approx((TOKENS - 1) * batch / sum(gained.rounds))
    assert gained.paused_rounds == 0
    parts = [gained.seconds[name] for name in ("target", "draft", "verify", "commit")]
    assert all(seconds > 0 for seconds in parts) and sum(parts) <= gained.seconds["total"]
    assert gained.rest == pytest.approx(gained.seconds["total"] - parts[0] - parts[1])
    if not tree:
        assert gained.verified == sum(gained.offered_by_depth)
    if script == "adversary":
        assert gained.accepted == 0 and gained.tau == 1
    if script == "oracle":
        assert gained.rounds == [math.ceil((TOKENS - 1) / (K + 1))] * batch


def test_drafter_that_finds_nothing_is_not_paused(target, monkeypatch):
    drafter = scripted(target, 1, [oracle(K)])
    start = type(drafter).start

    def without_ideas(this, view, batch):
        session = start(this, view, batch)
        session.propose = lambda context: Draft.empty(batch)
        return session

    monkeypatch.setattr(type(drafter), "start", without_ideas)
    out = target.generate(
        **prompts(1), assistant_model=drafter, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    assert out.speculation.rounds == [3] and out.speculation.drafted == 0
    assert out.speculation.paused_rounds == 0


@pytest.mark.parametrize("script", [oracle(K), adversary], ids=["oracle", "adversary"])
def test_several_sequences_per_prompt(target, script):
    """Rows of one prompt differ, follow the target's law one by one, and come in plain's order."""
    inputs = prompts(2)
    drafter = scripted(target, len(inputs["input_ids"]), [script])
    drafter.answers = [answer for answer in drafter.answers for _ in range(3)]
    out = target.generate(
        **inputs, assistant_model=drafter, do_sample=True, num_return_sequences=3, max_new_tokens=TOKENS
    )
    width = inputs["input_ids"].shape[1]
    assert out.shape == (6, width + TOKENS)
    assert torch.equal(out[:, :width], inputs["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in out.tolist()}) == 6
    # At a temperature near zero every row is the greedy one.
    cold = target.generate(
        **inputs,
        assistant_model=drafter,
        do_sample=True,
        temperature=1e-4,
        num_return_sequences=3,
        max_new_tokens=TOKENS,
    )
    greedy = target.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    assert torch.equal(cold, greedy.repeat_interleave(3, 0))


def test_beams_are_refused_by_name(target):
    inputs = prompts(1)
    drafter = scripted(target, len(inputs["input_ids"]), [oracle(K)])
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(**inputs, assistant_model=drafter, num_beams=2, max_new_tokens=4)


# streaming ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("batch", [1, 3])
def test_streamer_gets_one_id_per_row_and_step(target, script, tree, batch):
    inputs = prompts(batch)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script], oracle(K), adversary], tree=tree)
    ends = [drafter.answers[-1][-FREE + 7]]
    streamer = Recording()
    settings = dict(max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends)
    if batch == 1:
        plain = Recording()
        target.generate(**inputs, streamer=plain, **settings)
        out = target.generate(**inputs, assistant_model=drafter, streamer=streamer, **settings)
        assert streamer.puts == plain.puts
    else:
        out = target.generate(**inputs, assistant_model=drafter, streamer=streamer, **settings)
    assert streamer.puts[0] == inputs["input_ids"].tolist()
    assert torch.equal(torch.tensor(streamer.puts[1:]).T, out[:, inputs["input_ids"].shape[1] :])
    assert streamer.ends == 1


def test_rows_are_streamed_before_the_call_ends(target):
    inputs = prompts(2)
    drafter = scripted(target, len(inputs["input_ids"]), [oracle(K), adversary])
    seen = []

    class Watching(Recording):
        def put(self, value):
            super().put(value)
            seen.append(passes[0])

    passes = [0]
    hook = target.model.register_forward_hook(lambda *args: passes.__setitem__(0, passes[0] + 1))
    try:
        target.generate(**inputs, assistant_model=drafter, streamer=Watching(), max_new_tokens=TOKENS, do_sample=False)
    finally:
        hook.remove()
    # Step t is complete when the slower row has it, one pass per token.
    assert seen == [0, *range(1, TOKENS + 1)]


def forced(ids: list[int], prompt: int):
    """A processor under which the target can only write `ids`."""

    def process(input_ids, scores):
        at = input_ids.shape[1] - prompt
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([ids[at % len(ids)]]), 0.0)

    return process


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("script", [oracle(9), adversary], ids=["oracle", "adversary"])
def test_text_streamer_with_a_character_split_over_rounds(length, script):
    target, tokenizer = tiny_llama(vocab=256), byte_tokenizer()
    text = "naïve → 学习 🙂 done."
    ids = tokenizer(text).input_ids
    prompt = tokenizer("say:", return_tensors="pt").input_ids
    drafter = ScriptedDrafter([prompt[0].tolist() + ids + [1]], [script], length, vocab=256)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    arguments = dict(
        input_ids=prompt,
        assistant_model=drafter,
        logits_processor=[forced(ids, prompt.shape[1])],
        streamer=streamer,
        max_new_tokens=len(ids),
        do_sample=False,
    )
    worker = threading.Thread(target=lambda: target.generate(**arguments))
    worker.start()
    parts = list(streamer)
    worker.join()
    assert "".join(parts) == text and len(parts) > 1
    assert not any("\ufffd" in part for part in parts)
