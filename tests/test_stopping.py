"""Every rule that ends a row holds to the token, wherever in a draft it strikes."""

from __future__ import annotations

import pytest
import torch
from conftest import ScriptedDrafter, mixed, oracle, tiny_llama
from scripted import Recording, byte_tokenizer, new_tokens, prompts, scripted, scripts
from transformers import LogitsProcessor, StoppingCriteria

from hf_specdraft import speculate
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter

K = 6
SCRIPTS = scripts(16) | {"mixed": mixed(K)}


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def distinct_at(tokens: list[int], index: int) -> int:
    """The token at `index`, checked to be the first of its kind (so that stopping at it means stopping there)."""
    assert tokens[index] not in tokens[:index]
    return tokens[index]


everywhere = pytest.mark.parametrize("script", SCRIPTS)
shapes = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


# end tokens -----------------------------------------------------------------------------------------------------------


@everywhere
@shapes
@pytest.mark.parametrize("many", [False, True], ids=["one", "list"])
def test_end_token_inside_a_block_ends_the_row_and_the_stream(target, script, tree, many):
    inputs = prompts(1)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], 16, tree)
    answer = drafter.answers[0][8:]
    end = distinct_at(answer, 3)
    streamer = Recording()
    out = target.generate(
        **inputs,
        assistant_model=drafter,
        eos_token_id=[answer[9], end] if many else end,
        max_new_tokens=30,
        do_sample=False,
        streamer=streamer,
    )
    assert new_tokens(out, inputs) == [answer[:4]]
    assert streamer.puts == [inputs["input_ids"].tolist()] + [[token] for token in answer[:4]]
    assert streamer.ends == 1


@everywhere
@shapes
def test_rows_that_end_at_different_times_leave_the_pass(target, script, tree):
    inputs = prompts(8)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], K, tree)
    free = [row[-48:] for row in drafter.answers]
    ends = [row[2 + 4 * b] for b, row in enumerate(free)]
    expected = target.generate(**inputs, eos_token_id=ends, max_new_tokens=40, do_sample=False)
    lengths = {next(i for i, t in enumerate(row) if t in ends) for row in free}
    assert len(lengths) > 3
    # The first tree for a target is preceded by passes that probe it.
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=2, do_sample=False, pad_token_id=0)
    widths = []
    hook = target.model.register_forward_hook(lambda *args: widths.append(args[-1].last_hidden_state.shape[0]))
    try:
        out = target.generate(
            **inputs, assistant_model=drafter, eos_token_id=ends, max_new_tokens=40, do_sample=False, pad_token_id=0
        )
    finally:
        hook.remove()
    assert torch.equal(out, expected)
    assert widths[0] == 8 and widths[-1] < 8 and widths == sorted(widths, reverse=True)


@everywhere
def test_row_that_ends_with_its_first_token(target, script):
    inputs = prompts(3)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], K)
    ends = [drafter.answers[0][8]]
    expected = target.generate(**inputs, eos_token_id=ends, max_new_tokens=12, do_sample=False)
    out = target.generate(**inputs, assistant_model=drafter, eos_token_id=ends, max_new_tokens=12, do_sample=False)
    assert torch.equal(out, expected)
    assert out[0, 11] == ends[0] and not out[0, 12:].any()


@everywhere
@pytest.mark.parametrize("rule", [{"min_new_tokens": 10}, {"min_length": 18}], ids=["min_new_tokens", "min_length"])
@pytest.mark.parametrize("batch", [1, 3])
def test_minimum_length_forbids_the_end_token(target, script, rule, batch):
    inputs = prompts(batch)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], K)
    end = drafter.answers[0][8 + 3]
    expected = target.generate(**inputs, eos_token_id=end, max_new_tokens=30, do_sample=False, **rule)
    # Half of the drafts come from the answer in which the end token was allowed.
    answers = [row[mask.argmax() :].tolist() for row, mask in zip(expected, inputs["attention_mask"])]
    for known in (drafter.answers, answers):
        drafter.answers = known
        out = target.generate(
            **inputs, assistant_model=drafter, eos_token_id=end, max_new_tokens=30, do_sample=False, **rule
        )
        assert torch.equal(out, expected)
        assert out.shape[1] - inputs["input_ids"].shape[1] >= 7


def test_no_end_token_configured(target):
    repeated = torch.tensor([[5, 9, 17, 5, 9, 23, 5, 9]])
    assert target.generation_config.eos_token_id is None
    expected = target.generate(repeated, max_new_tokens=40, do_sample=False)
    drafter = NgramDrafter(NgramConfig.tiny(policy="fixed"))
    out = target.generate(repeated, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert torch.equal(out, expected)


# lengths --------------------------------------------------------------------------------------------------------------


@everywhere
@shapes
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 17])
def test_exactly_as_many_tokens_as_asked_for(target, script, tree, tokens):
    inputs = prompts(3)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], 16, tree)
    out = target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert new_tokens(out.sequences, inputs) == [row[-48:][:tokens] for row in drafter.answers]
    # No draft is made that could not be used: the pass gives one token of its own.
    limit = tokens - 2
    assert len(out.speculation.offered_by_depth) <= max(limit, 0)
    if script == "oracle" and not tree:
        assert out.speculation.rounds == [-(-(tokens - 1) // 17)] * 3


@everywhere
def test_max_length_one_above_the_prompt(target, script):
    inputs = prompts(1)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], 16)
    out = target.generate(**inputs, assistant_model=drafter, max_length=9, do_sample=False)
    assert new_tokens(out, inputs) == [drafter.answers[0][8:9]]


# stopping criteria ----------------------------------------------------------------------------------------------------


class LastIs(StoppingCriteria):
    """Each row stops at its own token; counts how often it was shown each prefix of a row."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens)
        self.shown: list[tuple[int, ...]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown += [tuple(row) for row in input_ids.tolist()]
        return input_ids[:, -1] == self.tokens


@everywhere
@shapes
def test_custom_criterion_stops_inside_a_block(target, script, tree):
    inputs = prompts(1)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], 16, tree)
    answer = drafter.answers[0][8:]
    rule = LastIs([distinct_at(answer, 3)])
    out = target.generate(
        **inputs, assistant_model=drafter, stopping_criteria=[rule], max_new_tokens=22, do_sample=False
    )
    assert new_tokens(out, inputs) == [answer[:4]]
    prompt = inputs["input_ids"][0].tolist()
    # Asked once about every prefix, in order, as plain generate asks.
    assert rule.shown == [tuple(prompt + answer[: i + 1]) for i in range(4)]


@everywhere
@shapes
@pytest.mark.parametrize("end", [False, True], ids=["alone", "with-end-token"])
def test_custom_criterion_in_a_batch(target, script, tree, end):
    inputs = prompts(4)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], K, tree)
    free = [row[-48:] for row in drafter.answers]
    settings = {"max_new_tokens": 30, "do_sample": False}
    if end:
        settings["eos_token_id"] = free[1][8]
    tokens = [row[i] for row, i in zip(free, (3, 22, 9, 14))]
    expected = target.generate(**inputs, stopping_criteria=[LastIs(tokens)], **settings)
    out = target.generate(**inputs, assistant_model=drafter, stopping_criteria=[LastIs(tokens)], **settings)
    assert torch.equal(out, expected)
    assert 8 < out.shape[1] - inputs["input_ids"].shape[1] < 30


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("end", [None, 63], ids=["alone", "with-end-token"])
def test_one_answer_for_all_rows(target, shape, end):
    """Plain generate broadcasts it."""

    def rule(input_ids, scores, **kwargs):
        return torch.full(shape, input_ids.shape[1] >= 11 + 9)

    inputs = prompts(3)
    settings = {"max_new_tokens": 30, "do_sample": False, "stopping_criteria": [rule], "eos_token_id": end}
    expected = target.generate(**inputs, **settings)
    drafter = scripted(target, 3, [oracle(K), mixed(K)], K)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, **settings), expected)
    assert expected.shape[1] == 11 + 9


class LowScore(StoppingCriteria):
    """Stops where the best score of the latest step is low."""

    def __init__(self, bound: float):
        self.bound = bound

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].amax(-1) < self.bound


@everywhere
@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["prefix-free", "prefixed"])
def test_criterion_that_reads_scores(target, script, penalty):
    inputs = prompts(1)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], K, penalty=penalty)
    settings = {
        "max_new_tokens": 30,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
        "repetition_penalty": penalty,
    }
    best = [float(s.amax()) for s in target.generate(**inputs, **settings).scores]
    bound = sorted(best)[2] + 1e-3
    expected = target.generate(**inputs, stopping_criteria=[LowScore(bound)], **settings)
    out = target.generate(**inputs, assistant_model=drafter, stopping_criteria=[LowScore(bound)], **settings)
    assert torch.equal(out.sequences, expected.sequences)
    assert len(out.scores) == len(expected.scores) < 30


@everywhere
@shapes
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_stop_string_over_three_tokens(target, script, tree, batch, route):
    tokenizer = byte_tokenizer("".join(chr(33 + i) for i in range(64)))
    inputs = prompts(batch)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], K, tree)
    spans = [row[-48:][i : i + 3] for row, i in zip(drafter.answers, (4, 9, 15))]
    strings = [tokenizer.decode(span) for span in spans]
    settings = {"max_new_tokens": 40, "do_sample": False}
    expected = target.generate(**inputs, stop_strings=strings, tokenizer=tokenizer, **settings)
    if route == "assistant_model":
        out = target.generate(**inputs, assistant_model=drafter, stop_strings=strings, tokenizer=tokenizer, **settings)
    else:
        method = speculate(drafter, tokenizer=tokenizer, stop_strings=strings)
        out = target.generate(**inputs, custom_generate=method, **settings)
    assert torch.equal(out, expected)
    assert out.shape[1] - inputs["input_ids"].shape[1] < 40
    assert batch > 1 or out.shape[1] == 8 + 7


class Grammar(LogitsProcessor):
    """Allows only the tokens of `word`, then the end token; raises when it is asked to go on after that."""

    def __init__(self, word: list[int], end: int, prompt: int):
        self.word, self.end, self.prompt, self.calls = word, end, prompt, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        for row in input_ids[:, self.prompt :].tolist():
            if row != self.word[: len(row)]:
                raise RuntimeError(f"asked about {row}, which the grammar left or ended before")
        at = input_ids.shape[1] - self.prompt
        allowed = self.word[at] if at < len(self.word) else self.end
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([allowed]), 0.0)


@everywhere
@shapes
@pytest.mark.parametrize("do_sample", [False, True])
def test_grammar_is_never_asked_beyond_its_end(target, script, tree, do_sample):
    inputs = prompts(1)
    word, end = [7, 9, 7, 30, 31, 7, 9, 12, 13, 14], 63
    grammar = Grammar(word, end, 8)
    answer = inputs["input_ids"][0].tolist() + word + [end] + [1] * 20
    drafter = ScriptedDrafter([answer], [SCRIPTS[script]], 8, tree)
    out = target.generate(
        **inputs,
        assistant_model=drafter,
        logits_processor=[grammar],
        eos_token_id=end,
        max_new_tokens=30,
        do_sample=do_sample,
    )
    assert new_tokens(out, inputs) == [word + [end]]
    # Once for every token of the answer, as plain generate asks; a rejected or superfluous node is never asked about.
    assert grammar.calls == len(word) + 1


# time -----------------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("end", [False, True], ids=["no-end-token", "with-end-token"])
def test_max_time_is_looked_at_after_every_pass(target, script, end, monkeypatch):
    inputs = prompts(3)
    drafter = scripted(target, len(inputs["input_ids"]), [SCRIPTS[script]], K)
    seconds = [0.0]

    def tick(*args):
        seconds[0] += 1.0

    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: seconds[0])
    hook = target.model.register_forward_hook(tick)
    try:
        out = target.generate(
            **inputs,
            assistant_model=drafter,
            max_time=4.5,
            max_new_tokens=48,
            do_sample=False,
            eos_token_id=0 if end else None,
        )
    finally:
        hook.remove()
    # Prefill and four rounds: 1 token, then accepted + 1 each.
    tokens = {"oracle": 1 + 4 * (K + 1), "adversary": 5, "mixed": 1 + (1 + 2 + 3 + 4)}[script]
    assert seconds[0] == 5
    assert new_tokens(out, inputs) == [row[-48:][:tokens] for row in drafter.answers]


def test_no_time_at_all_gives_plains_single_token(target):
    inputs = prompts(1)
    drafter = scripted(target, len(inputs["input_ids"]), [oracle(K)], K)
    expected = target.generate(**inputs, max_time=1e-9, max_new_tokens=20, do_sample=False)
    out = target.generate(**inputs, assistant_model=drafter, max_time=1e-9, max_new_tokens=20, do_sample=False)
    assert torch.equal(out, expected)
