"""Greedy output under every logits processor equals plain generate's, whatever is drafted.

Each case runs with three drafters: an oracle of the unprocessed text (whose tokens the processors mostly change, field
case 30), an oracle of the processed text (all of which must be accepted: a processor that saw a wrong prefix would cost
acceptance long before it costs equality), and one that insists on tokens the request forbids (field case 31).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from conftest import ScriptedDrafter, oracle
from targets import LENGTHS, VOCAB, padded, prompts, target
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

from hf_specdraft.rows import Rows
from hf_specdraft.sampling import Scorer

K = 5
NEW = 24


class RowBias(LogitsProcessor):
    """A user's processor that treats rows by number and reads the prefix's length and last token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, (7 * row + 3 * input_ids.shape[1] + int(input_ids[row, -1])) % VOCAB] += 8.0
        return scores


class NoReturn(LogitsProcessor):
    """A user's processor that reads the prefix only: no token may come back within three tokens."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -3:], -torch.inf)


def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Four ids, by length and row."""
    return [(7 * len(ids) + 13 * batch_id + 5 * j) % VOCAB for j in range(4)]


def free(lengths: tuple[int, ...]) -> list[list[int]]:
    """Plain's new tokens without any processor."""
    return new_tokens(lengths, {})


def new_tokens(lengths, kwargs) -> list[list[int]]:
    out = target("llama").generate(
        **padded(prompts(lengths)), **{**dict(max_new_tokens=NEW, do_sample=False), **kwargs}
    )
    return out[:, max(lengths) :].tolist()


@cache
def words() -> list[int]:
    """The first row's unprocessed tokens: what processors are aimed at."""
    return free(LENGTHS)[0]


@dataclass
class Case:
    """changes: the processors' settings. base: what the unprocessed text is generated with. never: ids that no output
    holds, which the stubborn drafter proposes (else it proposes `insists`). one_row: exact for one row only."""

    changes: Callable[[], dict[str, Any]]
    base: Callable[[], dict[str, Any]] = dict
    never: Callable[[], list[int]] = list
    one_row: bool = False
    insists: Callable[[], list[int]] = field(default=lambda: [words()[3]])


def ends() -> dict:
    """An end token that stands early in the first row's text."""
    return {"eos_token_id": words()[3]}


CASES = {
    "repetition_penalty": Case(lambda: dict(repetition_penalty=1.5)),
    "repetition_penalty below 1": Case(lambda: dict(repetition_penalty=0.8)),
    "no_repeat_ngram_size": Case(lambda: dict(no_repeat_ngram_size=2)),
    "encoder_repetition_penalty": Case(lambda: dict(encoder_repetition_penalty=1.8)),
    "encoder_no_repeat_ngram_size": Case(lambda: dict(encoder_no_repeat_ngram_size=1), never=lambda: prompts()[2][:1]),
    "bad_words_ids": Case(lambda: dict(bad_words_ids=[[words()[1]], words()[6:8]]), never=lambda: [words()[1]]),
    "sequence_bias": Case(lambda: dict(sequence_bias={(words()[2],): -9.0, tuple(words()[4:6]): -9.0, (9,): 3.0})),
    "min_length": Case(lambda: dict(min_length=max(LENGTHS) + 7), ends),
    "min_new_tokens": Case(lambda: dict(min_new_tokens=10), ends),
    "exponential_decay_length_penalty": Case(
        lambda: dict(exponential_decay_length_penalty=(4, 1.4)), lambda: {"eos_token_id": 40}
    ),
    "forced_eos_token_id": Case(lambda: dict(forced_eos_token_id=40), lambda: {"eos_token_id": 40}),
    "suppress_tokens": Case(lambda: dict(suppress_tokens=words()[:4]), never=lambda: words()[:4]),
    "begin_suppress_tokens": Case(lambda: dict(begin_suppress_tokens=[row[0] for row in free(LENGTHS)])),
    "prefix_allowed_tokens_fn": Case(lambda: dict(prefix_allowed_tokens_fn=allowed)),
    "watermark by the last token": Case(lambda: dict(watermarking_config=WatermarkingConfig(bias=4.0))),
    "watermark by its own hash": Case(
        lambda: dict(watermarking_config=WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=3)),
        lambda: dict(max_new_tokens=10),  # slow in plain generate too
    ),
    "renormalize_logits": Case(lambda: dict(repetition_penalty=1.5, renormalize_logits=True)),
    "remove_invalid_values": Case(lambda: dict(no_repeat_ngram_size=1, remove_invalid_values=True)),
    "processor by row number": Case(lambda: dict(logits_processor=LogitsProcessorList([RowBias()]))),
    "two own processors": Case(lambda: dict(logits_processor=LogitsProcessorList([NoReturn(), RowBias()]))),
    "several at once": Case(
        lambda: dict(
            repetition_penalty=1.3,
            no_repeat_ngram_size=3,
            suppress_tokens=words()[:2],
            min_new_tokens=6,
            logits_processor=LogitsProcessorList([NoReturn()]),
        ),
        ends,
        never=lambda: words()[:2],
    ),
    # Sampling from a single candidate is as predictable as greedy, and all warpers take part.
    "own processors before warpers": Case(
        lambda: dict(
            do_sample=True,
            top_k=1,
            temperature=0.7,
            top_p=0.9,
            min_p=0.05,
            typical_p=0.9,
            epsilon_cutoff=1e-3,
            eta_cutoff=1e-3,
            logits_processor=LogitsProcessorList([RowBias(), SuppressTokensLogitsProcessor(words()[:1], "cpu")]),
        ),
        never=lambda: words()[:1],
    ),
    "guidance_scale": Case(
        lambda: dict(guidance_scale=1.8, negative_prompt_ids=torch.tensor([[6, 2, 9]])), one_row=True
    ),
    "guidance_scale without a prompt": Case(lambda: dict(guidance_scale=2.5), one_row=True),
    "SynthID": Case(
        lambda: dict(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340])),
        one_row=True,
    ),
}
BATCHES = [pytest.param(LENGTHS[:1], id="batch1"), pytest.param(LENGTHS, id="batch4")]
forms = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


def assisted(lengths, new: list[list[int]], kwargs: dict, tree: bool, **fields):
    """The output when `new` [rows] are proposed after the prompts."""
    answers = [prompt + text for prompt, text in zip(prompts(lengths), new)]
    return target("llama").generate(
        **padded(prompts(lengths)),
        **{**dict(max_new_tokens=NEW, do_sample=False), **kwargs},
        assistant_model=ScriptedDrafter(answers, [oracle(K)], K, tree),
        return_dict_in_generate=True,
        **fields,
    )


def assert_equals_plain(case: Case, lengths, tree: bool):
    base, kwargs = case.base(), {**case.base(), **case.changes()}
    without, plain = new_tokens(lengths, base), new_tokens(lengths, kwargs)
    assert plain != without
    width = max(lengths)

    for text in (without, [row[:1] + row for row in without]):  # also out of step with itself
        out = assisted(lengths, text, kwargs, tree)
        assert out.sequences[:, width:].tolist() == plain
        assert out.speculation.verified > 0

    out = assisted(lengths, plain, kwargs, tree)
    assert out.sequences[:, width:].tolist() == plain
    assert out.speculation.rounds == [math.ceil((n - 1) / (K + 1)) for n in out.speculation.tokens]

    stubborn = (case.never() or case.insists()) * NEW
    out = assisted(lengths, [stubborn[:NEW]] * len(lengths), kwargs, tree)
    assert out.sequences[:, width:].tolist() == plain
    if case.never():
        assert not set(case.never()) & {token for row in plain for token in row}
        assert tree or out.speculation.accepted == 0


@forms
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_plain(name, lengths, tree):
    """Field cases 22, 30 and 31."""
    case = CASES[name]
    if case.one_row and len(lengths) > 1:
        with pytest.raises(ValueError, match="(UnbatchedClassifierFreeGuidance|SynthIDText).*one row at a time"):
            assisted(lengths, free(lengths), case.changes(), tree)
        return
    assert_equals_plain(case, lengths, tree)


@forms
def test_forced_bos(tree):
    """Acts on prompts of one token only."""
    kwargs = dict(forced_bos_token_id=7)
    plain = new_tokens((1, 1), kwargs)
    assert [row[0] for row in plain] == [7, 7]
    for text in (plain, new_tokens((1, 1), {})):
        assert assisted((1, 1), text, kwargs, tree).sequences[:, 1:].tolist() == plain


@forms
def test_row_numbers_of_several_sequences_per_prompt(tree):
    """With num_return_sequences, prefix_allowed_tokens_fn gets the prompt's number and other processors the row's."""
    for changes in (
        dict(prefix_allowed_tokens_fn=allowed),
        dict(logits_processor=LogitsProcessorList([RowBias()])),
    ):
        kwargs = dict(do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=NEW, **changes)
        inputs = padded(prompts((5, 8)))
        plain = target("llama").generate(**inputs, **kwargs)
        width = inputs["input_ids"].shape[1]
        for rounds in (1, K):  # full and uneven acceptance, so that rows come to the processors in every grouping
            answers = [
                prompts((5, 8))[b // 3] + (plain[b, width:].tolist() if b % 2 or rounds == 1 else [1] * NEW)
                for b in range(6)
            ]
            drafter = ScriptedDrafter(answers, [oracle(K)], K, tree)
            assert torch.equal(target("llama").generate(**inputs, **kwargs, assistant_model=drafter), plain)


# ---- processors that keep state ----


class Automaton(LogitsProcessor):
    """A grammar: tokens of falling and rising parity in turn, nine of them, then the end token. Advances by one token a
    call, and raises when it is called again after the end."""

    def __init__(self, end: int):
        self.end, self.state = end, -1
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, input_ids, scores):
        if self.state >= 0 and int(input_ids[0, -1]) == self.end:
            raise RuntimeError("the automaton has ended")
        self.state += 1
        self.asked.append(tuple(input_ids[0].tolist()))
        ids = torch.arange(VOCAB)
        fits = ids == self.end if self.state == 9 else (ids % 2 == self.state % 2) & (ids != self.end)
        return scores.masked_fill(~fits, -torch.inf)


@forms
@pytest.mark.parametrize("k", [3, 8, 12])
def test_automaton_is_never_asked_past_its_end(tree, k):
    """Field case 18: asked about every committed prefix once, in order, and about nothing else."""
    end = 40
    model, (prompt,) = target("llama"), prompts((8,))
    settings = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=end)
    before = Automaton(end)
    plain = model.generate(torch.tensor([prompt]), **settings, logits_processor=LogitsProcessorList([before]))
    assert plain.shape[1] == 8 + 10 and plain[0, -1] == end
    for answer in (plain[0].tolist() + [3, 4, 5, 6], prompt + free((8,))[0], prompt + [end] * NEW):
        automaton = Automaton(end)
        drafter = ScriptedDrafter([answer], [oracle(k)], k, tree)
        out = model.generate(
            torch.tensor([prompt]),
            **settings,
            assistant_model=drafter,
            logits_processor=LogitsProcessorList([automaton]),
        )
        assert torch.equal(out, plain)
        assert automaton.asked == before.asked


class Listener(LogitsProcessor):
    """Hears every prefix."""

    def __init__(self):
        self.heard: set[tuple[int, ...]] = set()

    def __call__(self, input_ids, scores):
        self.heard |= set(map(tuple, input_ids.tolist()))
        return scores


@forms
def test_rows_of_a_batch_are_asked_about_committed_prefixes_only(tree):
    settings = {**ends(), "repetition_penalty": 1.2}
    before, after = Listener(), Listener()
    plain = new_tokens(LENGTHS, {**settings, "logits_processor": LogitsProcessorList([before])})
    kwargs = {**settings, "logits_processor": LogitsProcessorList([after])}
    out = assisted(LENGTHS, [row[:9] + [1] * NEW for row in plain], kwargs, tree)
    assert out.sequences[:, max(LENGTHS) :].tolist() == plain
    assert after.heard and after.heard <= before.heard


# ---- broken on purpose ----


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "processor by row number"]
)
def test_prompt_only_prefixes_are_noticed(monkeypatch, name):
    """Processors that do not see the drafted tokens before each position."""
    monkeypatch.setattr(Rows, "prefix", lambda self, row, ahead=(): self.prompt[row])
    with pytest.raises(AssertionError):
        assert_equals_plain(CASES[name], LENGTHS, False)


def test_forgotten_processors_are_noticed(monkeypatch):
    """Schema constraints silently not applied to drafted tokens (field case 31)."""
    call = Scorer._call

    def only_first(self, processor, ids, scores, rows):
        return call(self, processor, ids, scores, rows) if ids.shape[1] == max(LENGTHS) else scores

    monkeypatch.setattr(Scorer, "_call", only_first)
    with pytest.raises(AssertionError):
        assert_equals_plain(CASES["prefix_allowed_tokens_fn"], LENGTHS, True)


def test_rows_out_of_place_are_noticed(monkeypatch):
    """Rows that reach a processor under another row's number."""

    def packed(self, processor, ids, scores, rows):
        return processor(ids, scores)

    monkeypatch.setattr(Scorer, "_call", packed)
    with pytest.raises(AssertionError):
        assert_equals_plain(CASES["processor by row number"], LENGTHS, False)
