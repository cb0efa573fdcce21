"""The measurements: are the counts the true counts, and does the verdict tell rounding from a fault?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ScriptedDrafter, adversary, oracle, tiny_llama

from hf_specdraft import AutoDrafter, evaluation
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.evaluation import FAULT, LOOKUP, PLAIN, TIE, Record, classify_difference, run


def inputs_of(ids):
    ids = torch.tensor([ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


PROMPT = [5, 9, 3, 5, 9, 3, 7, 5]


def scripted(target, script, length, tokens, prompt=PROMPT):
    answer = target.generate(**inputs_of(prompt), max_new_tokens=tokens + length, do_sample=False)[0].tolist()
    return ScriptedDrafter([answer], [script], length)


# Prompts and specs ----------------------------------------------------------------------------------------------------


def test_prompts_are_cut_per_category_in_file_order(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "x")]
    file.write_text(
        "\n".join(json.dumps({"id": i, "category": c, "turns": [i * 2, "later"]}) for i, c in rows) + "\n\n"
    )
    assert [p.id for p in evaluation.read_prompts(file)] == ["a", "b", "c", "d"]
    chosen = evaluation.read_prompts(file, per_category=2)
    assert [(p.id, p.category, p.text) for p in chosen] == [("a", "x", "aa"), ("b", "y", "bb"), ("c", "x", "cc")]


@pytest.mark.parametrize("line", ["{", '{"id": 1}', '{"id": 1, "category": "x", "turns": []}', "[]"])
def test_a_bad_prompt_line_is_named(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 1, "category": "x", "turns": ["hi"]}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        evaluation.read_prompts(file)


def test_an_empty_prompt_file_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        evaluation.read_prompts(tmp_path / "empty.jsonl")


def test_drafter_options_reach_the_config():
    drafter = evaluation.load_drafter("ngram:tree_nodes=10,policy=fixed")
    assert (drafter.config.tree_nodes, drafter.config.policy) == (10, "fixed")


@pytest.mark.parametrize("spec, message", [("ngram:nodes=3", "no field nodes"), ("ngram:tree_nodes", "key=value")])
def test_bad_drafter_options_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        evaluation.load_drafter(spec)


def test_a_causal_lm_becomes_an_assistant(tmp_path):
    tiny_llama(1).save_pretrained(tmp_path)
    drafter = evaluation.load_drafter(f"{tmp_path}:num_assistant_tokens=3,policy=fixed")
    assert isinstance(drafter, AssistantDrafter) and not drafter.training
    assert (drafter.config.num_assistant_tokens, drafter.config.policy) == (3, "fixed")
    ids = torch.tensor([PROMPT])
    assert torch.equal(drafter(ids).logits, tiny_llama(1)(ids).logits)
    with pytest.raises(ValueError, match="no field tree_node"):
        evaluation.load_drafter(f"{tmp_path}:tree_node=3")
    with pytest.raises(ValueError, match="no drafter this package can read"):
        AutoDrafter.from_pretrained(tmp_path)


def test_an_unknown_drafter_of_a_known_model_type_is_no_assistant(tmp_path):
    tiny_llama(1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for names in (["WonderDraftModel"], None):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(ValueError, match="no drafter this package can read"):
            evaluation.load_drafter(str(tmp_path))


# Rounding tie or real fault -------------------------------------------------------------------------------------------


@pytest.fixture
def texts():
    """A target, and plain's 12 new tokens."""
    target = tiny_llama()
    return target, run(target, inputs_of(PROMPT), 12).ids


@torch.no_grad()
def ranking(target, ids):
    return target(torch.tensor([ids])).logits[0, -1].argsort(descending=True).tolist()


def test_equal_texts_have_no_difference(texts):
    target, plain = texts
    assert classify_difference(target, PROMPT, plain, list(plain)) is None


def test_a_clear_second_choice_is_a_fault(texts):
    target, plain = texts
    second = ranking(target, PROMPT + plain[:3])[1]
    found = classify_difference(target, torch.tensor(PROMPT), torch.tensor(plain), plain[:3] + [second] + plain[4:])
    assert (found.position, found.plain_token, found.other_token) == (3, plain[3], second)
    assert found.top_tokens == (plain[3], second)
    assert found.verdict == FAULT and found.shortfall == found.gap > found.tolerance


def test_a_near_tie_is_rounding_but_the_third_choice_there_is_not(texts):
    target, plain = texts
    first, second, third = ranking(target, PROMPT + plain[:3])[:3]
    # float32 numbers near a logit of 1 to 100 lie 1e-7 to 8e-6 apart: a relative 1e-7 is within two steps.
    with torch.no_grad():
        target.lm_head.weight[second] = target.lm_head.weight[first] * (1 - 1e-7)
    near = classify_difference(target, PROMPT, plain, plain[:3] + [second])
    assert (near.position, near.verdict) == (3, TIE)
    far = classify_difference(target, PROMPT, plain, plain[:3] + [third])
    assert far.gap == near.gap and far.shortfall > far.gap
    assert far.verdict == FAULT


def test_bfloat16_grants_two_steps_at_the_logits_size(texts):
    target = texts[0].to(torch.bfloat16)
    prompt = inputs_of(PROMPT)
    plain = run(target, prompt, 1).ids
    first, second = ranking(target, PROMPT)[:2]
    found = classify_difference(target, PROMPT, plain, [second])
    with torch.no_grad():
        logits = target(prompt["input_ids"]).logits[0, -1].float()
    step = 2.0 ** (math.floor(math.log2(logits[first].item())) - 7)
    assert found.tolerance >= 2 * step
    assert found.verdict == (TIE if found.gap <= found.tolerance else FAULT)
    assert classify_difference(target, PROMPT, plain, [second], steps=1e4).verdict == TIE


def test_a_text_that_stops_early_is_a_fault(texts):
    target, plain = texts
    for other in (plain[:5], plain + [1]):
        found = classify_difference(target, PROMPT, plain, other)
        assert found.position == min(len(plain), len(other)) and found.verdict == FAULT


def test_processors_of_the_call_are_applied(texts):
    target, plain = texts
    first, second, *_, last = ranking(target, PROMPT)

    def swap(ids, scores):
        scores[:, last] = scores.max() + 1
        return scores

    assert classify_difference(target, PROMPT, [last], [second], logits_processor=swap).top_tokens[0] == last
    assert classify_difference(target, PROMPT, [first], [second]).top_tokens[0] == first


# Counts ---------------------------------------------------------------------------------------------------------------


def test_plain_commits_one_token_a_pass():
    measured = run(tiny_llama(), inputs_of(PROMPT), 9)
    assert (len(measured.ids), measured.passes, measured.committed) == (9, 8, 8)
    assert 0 < measured.prefill_seconds < measured.target_seconds < measured.seconds
    assert measured.draft_seconds == 0


@pytest.mark.parametrize("tokens", [1, 2, 24])
def test_prompt_lookup_counts_what_its_streamer_sees(tokens):
    target, blocks = tiny_llama(), []
    streamer = SimpleNamespace(put=lambda ids: blocks.append(ids.numel()), end=lambda: None)
    measured = run(target, inputs_of(PROMPT), tokens, prompt_lookup_num_tokens=5, streamer=streamer)
    prompt, first, *later = blocks
    assert prompt == len(PROMPT)
    assert (measured.passes, measured.committed) == (len(later), sum(later))
    assert first + sum(later) == len(measured.ids) == tokens


def test_a_draft_accepted_in_prompt_lookups_first_pass_is_left_out():
    target = tiny_llama()
    # Prompts a b 7 a: lookup drafts b first. Some pair is one that the target goes on with.
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    prompts = torch.stack((pairs[:, 0], pairs[:, 1], torch.full((4096,), 7), pairs[:, 0]), dim=1)
    with torch.no_grad():
        chosen = target(prompts).logits[:, -1].argmax(-1)
    prompt = prompts[chosen == pairs[:, 1]][0].tolist()
    blocks = []
    streamer = SimpleNamespace(put=lambda ids: blocks.append(ids.numel()), end=lambda: None)
    measured = run(target, inputs_of(prompt), 8, prompt_lookup_num_tokens=4, streamer=streamer)
    assert blocks[1] > 1
    assert measured.committed == sum(blocks[2:]) < 7


@pytest.mark.parametrize("script, passes", [(oracle(4), 4), (adversary, 20)])
def test_our_statistics_agree_with_passes_counted_from_outside(script, passes):
    target = tiny_llama()
    drafter = scripted(target, script, 4, 21)
    # The first call on a target also probes what masks it obeys.
    run(target, inputs_of(PROMPT), 1, assistant_model=drafter)
    with evaluation.PassClock(target) as clock:
        measured = run(target, inputs_of(PROMPT), 21, assistant_model=drafter)
    assert (measured.passes, measured.committed) == (passes, 20)
    assert len(clock.seconds) == passes + 1
    assert not target._forward_hooks and not target._forward_pre_hooks


# Sampling -------------------------------------------------------------------------------------------------------------


class TwoLaws:
    """Stands for a target whose assisted draws follow `assisted` and whose plain ones follow `plain`."""

    def __init__(self, plain, assisted):
        self.plain, self.assisted = torch.tensor(plain), torch.tensor(assisted)

    def generate(self, input_ids, max_new_tokens, num_return_sequences, assistant_model=None, **_):
        law = self.plain if assistant_model is None else self.assisted
        drawn = torch.multinomial(law.expand(num_return_sequences, -1), max_new_tokens, replacement=True)
        return torch.cat((input_ids.expand(num_return_sequences, -1), drawn), dim=1)


def test_a_distance_tells_one_law_from_two():
    law, other = [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]
    same = evaluation.sampling_distance(TwoLaws(law, law), inputs_of(PROMPT), object(), draws=300)
    assert same.within_noise and same.tv < 0.2 and same.noise < 0.2
    wrong = evaluation.sampling_distance(TwoLaws(law, other), inputs_of(PROMPT), object(), draws=300)
    assert not wrong.within_noise and wrong.tv > wrong.noise


def test_plain_draws_use_other_seeds_each_time():
    even = evaluation.sampling_distance(TwoLaws([0.25] * 4, [0.25] * 4), inputs_of(PROMPT), object(), draws=50)
    assert even.tv > 0 and even.noise > 0 and even.tv != even.noise


def test_our_sampling_is_within_noise():
    target = tiny_llama(vocab=16)
    prompt = [t % 16 for t in PROMPT]
    drafter = ScriptedDrafter([prompt] * 32, [adversary] * 32, 2, vocab=16)
    assert evaluation.sampling_distance(target, inputs_of(prompt), drafter, draws=64).within_noise


# The report -----------------------------------------------------------------------------------------------------------


def test_check_reports_a_lossless_oracle():
    target = tiny_llama()
    calls = []
    report = evaluation.check(
        target, scripted(target, oracle(3), 3, 17), {"p": inputs_of(PROMPT)}, 17, progress=lambda: calls.append(1)
    )
    assert report.lossless and not report.differences and calls == [1]
    assert (report.tokens, report.passes, report.committed, report.tau) == (17, 4, 16, 4.0)
    assert report.accepted_by_depth == report.offered_by_depth == [4, 4, 4]
    assert report.break_even == pytest.approx(report.round_seconds / report.token_seconds) and report.break_even > 0
    assert report.target_seconds + report.draft_seconds < report.assisted_seconds


def test_check_finds_a_corrupted_token(monkeypatch):
    target = tiny_llama()
    true_run = evaluation.run

    def corrupted(target, inputs, max_new_tokens, **arguments):
        measured = true_run(target, inputs, max_new_tokens, **arguments)
        if arguments:
            measured.ids[2] = (measured.ids[2] + 1) % 64
        return measured

    monkeypatch.setattr(evaluation.runs, "run", corrupted)
    report = evaluation.check(target, scripted(target, oracle(3), 3, 8), {"p": inputs_of(PROMPT)}, 8)
    assert not report.lossless
    assert (report.differences["p"].position, report.differences["p"].verdict) == (2, FAULT)


def test_a_distance_beyond_noise_is_not_lossless():
    far = evaluation.Distance(tv=0.5, noise=0.1, p_value=0.0005, draws=256, tokens=2)
    assert not evaluation.CheckReport(distances={"p": far}).lossless


# The benchmark --------------------------------------------------------------------------------------------------------


def record(method, repeat, seconds, *, prompt="p", category="x", passes=5, equal=True, target=0.5, draft=0.25):
    return Record(prompt, category, method, repeat, 11, passes, 10, seconds, 0.25, target, draft, equal)


def test_the_table_pools_prompts_and_spreads_over_repeats():
    records = [
        *(record(PLAIN, r, 4.0, passes=10) for r in range(3)),
        *(record(LOOKUP, r, 2.0) for r in range(3)),
        *(record("ours", r, s, passes=4, equal=r != 1) for r, s in enumerate((1.0, 2.0, 0.5))),
    ]
    rows = evaluation.summarise(records)
    assert [(r.category, r.method) for r in rows] == [(c, m) for c in ("x", "overall") for m in (PLAIN, LOOKUP, "ours")]
    plain, lookup, ours = rows[:3]
    assert (plain.tau, lookup.tau, ours.tau) == (1.0, 2.0, 2.5)
    assert ours.to_plain == (4.0, 2.0, 8.0) and ours.to_lookup == (2.0, 1.0, 4.0)
    assert plain.to_plain == (1.0, 1.0, 1.0)
    # (4 - 1/4) / (s - 1/4): a quarter of a second is everybody's prefill.
    assert ours.decoding_to_plain == pytest.approx((5.0, 3.75 / 1.75, 15.0))
    assert ours.tokens_per_second == 11.0
    assert (ours.equal, ours.prompts, lookup.equal) == (0, 1, 1)
    assert ours.outside == pytest.approx(1 - 3 * 0.75 / 3.5)


def test_a_time_split_that_is_unknown_stays_unknown():
    rows = evaluation.summarise([record(m, 0, 1.0, target=None, draft=None) for m in (PLAIN, LOOKUP)])
    assert all(row.outside is None for row in rows)


def test_methods_are_interleaved_and_rotated(monkeypatch):
    order = []

    def logged(target, inputs, max_new_tokens, **arguments):
        order.append(arguments["name"])
        return evaluation.Run([1], 1.0, 1, 1, 0.1, 0.5, 0.0)

    class Tokenizer:
        chat_template = None

        def __call__(self, text, return_tensors):
            return inputs_of([1, 2])

    monkeypatch.setattr(evaluation.runs, "run", logged)
    methods = {name: {"name": name} for name in (PLAIN, LOOKUP, "ours")}
    prompts = [evaluation.Prompt(i, "x", "hi") for i in "ab"]
    target = SimpleNamespace(device=torch.device("cpu"))
    records = list(evaluation.bench(target, Tokenizer(), prompts, methods, repeats=2))
    warm, rest = order[:3], order[3:]
    assert warm == [PLAIN, LOOKUP, "ours"]
    assert [rest[i] for i in range(0, 12, 3)] == [PLAIN, LOOKUP, LOOKUP, "ours"]
    assert all(sorted(rest[i : i + 3]) == sorted(methods) for i in range(0, 12, 3))
    assert len(records) == 12 and all(r.equal for r in records)


def test_provenance_names_versions_and_settings():
    about = evaluation.provenance(max_new_tokens=7)
    assert about["settings"] == {"max_new_tokens": 7}
    assert about["versions"]["torch"] == torch.__version__
    assert json.dumps(about)
    in_checkout = (Path(evaluation.__file__).parents[2] / ".git").exists()
    assert bool(about["commit"]) == in_checkout
