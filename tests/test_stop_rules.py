"""Rules that end a draft behind an unsure token: what they stop at, that nothing about the output changes, and that the
way they must not work would be noticed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import bias
import pytest
import torch
from conftest import tiny_llama
from scripted import prompts

from hf_specdraft import policies
from hf_specdraft.draft import Block, Draft, Partial
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.policies import Costs, FixedLength, PaysOff, Threshold, base
from hf_specdraft.policies.stop_rules import SVIP, CostAware, HFThreshold, Kangaroo, best_threshold
from hf_specdraft.trees import prune

RULES = {
    "hf_threshold": {"name": "hf_threshold", "threshold": 0.3},
    "svip": {"name": "svip", "threshold": 0.4},
    "kangaroo": {"name": "kangaroo", "threshold": 0.3},
    "kangaroo, cumulative": {"name": "kangaroo", "threshold": 0.2, "cumulative": True},
    "cost_aware": "cost_aware",
}
FAMILIES = {
    "assistant": lambda **f: AssistantDrafter.from_model(tiny_llama(3, vocab=f.pop("vocab_size", 64)), **f),
    "eagle3": lambda **f: Eagle3Drafter(Eagle3Config.tiny(**f)).eval(),
    "block": lambda **f: BlockDrafter(BlockConfig.tiny(**f)).eval(),
}


def situation(length: int = 8, batch: int = 1, costs: Costs | None = None, sequential: bool = True):
    drafter = SimpleNamespace(is_sequential=sequential)
    made = base.Situation(None, drafter, batch, 8, FixedLength(length, batch=batch))
    made.costs = lambda: costs
    return made


def asked(rule, laws: list[list[float]], tokens: list[int]) -> int:
    """How many tokens one row's draft has when the rule hears these laws and tokens one by one."""
    for step, (probs, token) in enumerate(zip(laws, tokens), 1):
        logits = torch.tensor([probs]).log()
        if step == len(laws) or not rule.more(Partial(step, torch.tensor([token]), logits))[0]:
            return step


# What each rule stops at --------------------------------------------------------------------------------------------


LAWS = [[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.9, 0.1]]


@pytest.mark.parametrize(
    "rule, tokens, length",
    [
        (Threshold(0.65), [0, 0, 0, 0], 3),
        (Threshold(0.35), [0, 1, 0, 0], 2),  # of the token itself, not of the best one
        (Kangaroo(situation(), 0.65), [0, 1, 0, 0], 3),  # of the best one, whatever was drawn
        (Kangaroo(situation(), 0.65, cumulative=True), [0, 0, 0, 0], 2),  # 0.9 * 0.7
        (SVIP(situation(), float("inf")), [0] * 4, 4),
        (SVIP(situation(), 0.0), [0] * 4, 1),
        (SVIP(situation(), 0.3), [0] * 4, 2),  # sqrt(0.15 * entropy) = 0.22, 0.30, 0.32
    ],
)
def test_a_draft_ends_behind_the_first_unsure_token(rule, tokens, length):
    assert asked(rule, LAWS, tokens) == length
    assert asked(rule, LAWS, tokens) == length, "a new draft begins at step 1"


def test_each_row_ends_for_itself():
    logits = torch.tensor([[0.9, 0.1], [0.5, 0.5], [float("nan"), 0.5]]).log()
    assert Kangaroo(situation(batch=3)).more(Partial(1, torch.tensor([0, 0, 0]), logits)) == [True, False, False]


def test_probabilities_of_a_reduced_vocabulary_are_looked_up_by_token():
    partial = Partial(1, torch.tensor([7, 3]), torch.tensor([[0.2, 0.8], [0.3, 0.7]]).log(), ids=torch.tensor([3, 7]))
    assert Threshold(0.5).more(partial) == [True, False]


def test_cost_aware_drafts_while_tokens_per_second_rise():
    """Against the best length by exhaustion, of laws that are equally sure at each step."""
    for sure, draft, node in itertools.product((0.95, 0.8, 0.5), (0.05, 0.3, 1.0), (0.0, 0.1)):
        costs = Costs({0: 1.0, 8: 1.0 + 8 * node}, 8 * draft)
        rule = CostAware(situation(8, costs=costs))
        rates = [sum(sure**i for i in range(n + 1)) / (1 + n * (node + draft)) for n in range(1, 9)]
        assert asked(rule, [[sure, 1 - sure]] * 8, [0] * 8) == rates.index(max(rates)) + 1
    assert asked(CostAware(situation(4, costs=Costs())), LAWS, [0] * 4) == 4, "nothing is known yet"


def test_the_online_threshold_is_transformers_own():
    """By exhaustion over the thresholds that tell the samples apart."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        chances = (torch.rand(30, generator=generator) * 10).round() / 10  # with ties
        right = torch.rand(30, generator=generator) < chances
        if not right.any() or right.all():
            continue
        costs = {
            float(t): float((chances[~right] >= t).float().mean() + 3 * (chances[right] < t).float().mean())
            for t in chances.unique()
        }
        chosen = best_threshold(chances, right)
        assert costs[chosen] == pytest.approx(min(costs.values()))
        assert all(t <= chosen for t, cost in costs.items() if cost < costs[chosen] + 1e-6)


def test_the_threshold_is_refitted_by_what_was_accepted():
    rule = HFThreshold(situation(4), threshold=0.1)
    for accepted, tokens in ((2, [0, 0, 0, 0]), (3, [0, 0, 0, 0]), (1, [0, 1, 0, 0])):
        rule.before([0])
        asked(rule, LAWS, tokens)
        rule.cut(Draft.chain(torch.tensor([tokens]), [4]), [True])
        rule.observe([0], [4], [[*tokens[:accepted], 5]])
    # 0.9, 0.7 right and 0.6 wrong; three right; 0.9 right and 0.3 wrong: 0.6 loses one of six right ones at most.
    assert rule.threshold == pytest.approx(0.6)
    fixed = HFThreshold(situation(4), threshold=0.1, online=False)
    asked(fixed, LAWS, [0] * 4)
    fixed.cut(Draft.chain(torch.zeros(1, 4, dtype=torch.long), [4]), [True])
    fixed.observe([0], [4], [[5]])
    assert fixed.threshold == 0.1


def test_the_threshold_learns_from_the_drafter_it_steers_alone():
    """Rows 0 to 3: verified as they were asked about, cut, in a tree beside others' tokens, and drafted by others."""
    rule = HFThreshold(situation(3, batch=4), threshold=0.1)
    for logits in torch.tensor([[0.9, 0.1], [0.7, 0.3]]).log():
        rule.more(Partial(1, torch.zeros(4, dtype=torch.long), logits.expand(4, -1)))
    tokens = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]])
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 1], [-1, -1, 1], [-1, 0, 1]])
    valid = torch.tensor([[True] * 3, [True, False, False], [True] * 3, [True] * 3])
    rule.cut(Draft(tokens, parents, valid), [True] * 4)
    rule.observe([0, 1, 2, 3], [3, 1, 2, 3], [[0, 5], [5], [0, 0, 5], [1, 1, 1, 5]])
    told = [(0.9, True), (0.7, False), (0.9, False), (0.9, True), (0.7, True)]
    assert [(round(sure, 4), right) for sure, right in rule._known] == told


# Blocks ---------------------------------------------------------------------------------------------------------------


def block_draft(laws: list[list[list[float]]]) -> Draft:
    logits = torch.tensor(laws).log()
    block = Block(logits, None, torch.zeros(*logits.shape[:2], 1), torch.zeros(len(laws), dtype=torch.long))
    tokens = logits.argmax(-1)
    return Draft.chain(tokens, [tokens.shape[1]] * len(laws), evidence=block, confidence_kind="prior")


def test_a_block_is_cut_behind_its_first_unsure_slot():
    sure, unsure = [0.9, 0.1], [0.6, 0.4]
    draft = block_draft([[sure, unsure, sure, sure], [unsure, sure, sure, sure], [sure, sure, sure, unsure]])
    cut = Kangaroo(situation(4, 3), 0.7).cut(draft, [True] * 3)
    assert cut.valid.sum(1).tolist() == [2, 1, 4]
    assert cut.tokens[0].tolist() == draft.tokens[0].tolist()


def test_what_was_asked_token_by_token_is_not_cut_again():
    rule, draft = Kangaroo(situation(4), 0.7), block_draft([[[0.6, 0.4]] * 4])
    rule.more(Partial(1, torch.tensor([0]), torch.zeros(1, 2)))
    assert rule.cut(draft, [True]) is draft
    assert rule.cut(draft, [True]).shape[1] == 1, "the next draft is"


# The output -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_plain(family, rule):
    target, inputs = tiny_llama(), prompts(3)
    drafter = FAMILIES[family](num_assistant_tokens=3, policy=RULES[rule])
    request = dict(max_new_tokens=30, do_sample=False, return_dict_in_generate=True)
    plain = target.generate(**inputs, **request)
    out = target.generate(**inputs, assistant_model=drafter, **request)
    assert torch.equal(out.sequences, plain.sequences)
    if rule != "cost_aware":
        assert out.speculation.verified < 3 * sum(out.speculation.rounds), "the rule acts"


@pytest.mark.parametrize("way", ["token by token", "cut"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_leave_the_law_of_the_output(rule, way):
    def decide(draft: Draft) -> Draft:
        made = policies.make(rule_options(rule), situation(2, 9, Costs({0: 1.0, 8: 1.2}, 0.3)))
        return bias.token_by_token(made)(draft) if way == "token by token" else made.cut(draft, [])

    assert max(bias.distance(seed, decide) for seed in range(6)) < 1e-12
    kept = sum(int(decide(bias.drafts(*bias.tables(seed)[2:])[0]).valid.sum()) for seed in range(6))
    assert 6 * 9 < kept < 6 * 18, "the rule acts, and the first token always stays"


def rule_options(rule: str) -> dict:
    """The rules at a threshold that some of the toy's tokens pass."""
    options = RULES[rule] if isinstance(RULES[rule], dict) else {"name": RULES[rule]}
    return options | ({"threshold": 0.38 if rule == "svip" else 0.45} if "threshold" in options else {})


def test_a_later_cut_knows_that_the_length_has_looked_at_tokens():
    """A pass over one node does not pay, one over two does: to drop both where the first token ended the draft would
    let that token decide about itself."""
    costs = Costs({0: 1.0, 1: 3.0, 2: 3.0})

    def decide(draft: Draft) -> Draft:
        alone = []
        for row in range(draft.shape[0]):
            pick = lambda x, row=row: x[row : row + 1]  # noqa: E731
            block = replace(draft.evidence, logits=pick(draft.evidence.logits), hidden=pick(draft.evidence.hidden))
            law = replace(draft.law, probs=pick(draft.law.probs), rows=pick(draft.law.rows))
            rating = torch.tensor([[1.0, 0.9]])
            one = Draft.chain(
                pick(draft.tokens), [2], law=law, confidence=rating, confidence_kind="prior", evidence=block
            )
            pays = PaysOff(FixedLength(2), costs)
            pays.rounds = PaysOff.warm_up
            pays.margin = 0.9
            alone.append(pays.cut(Threshold(0.4).cut(one, [True]), [True]))
        kept = torch.tensor([[bool(d.valid[:, j].any()) if j < d.shape[1] else False for j in (0, 1)] for d in alone])
        return prune(draft, kept, looked_at_token=False)

    whole, _ = bias.drafts(*bias.tables(0)[2:])
    lengths = decide(whole).valid.sum(1)
    assert set(lengths.tolist()) == {1, 2}, "the threshold cuts"
    for seed in range(6):
        assert bias.distance(seed, decide) < 1e-12


def test_a_threshold_of_zero_turns_the_drafters_own_off():
    drafter = AssistantDrafter.from_model(tiny_llama(3), confidence_threshold=0.3)
    given = lambda value: policies.threshold_of(policies.Settings(confidence_threshold=value), drafter)  # noqa: E731
    assert given(None).threshold == 0.3 and given(0.7).threshold == 0.7 and given(0.0) is None


def test_dropping_the_unsure_token_is_noticed():
    def dropping(draft: Draft) -> Draft:
        chances = draft.law.probs.gather(-1, draft.tokens[..., None])[..., 0]
        return prune(draft, chances >= 0.3, looked_at_token=False)

    assert max(bias.distance(seed, dropping) for seed in range(6)) > 0.01
    told = lambda draft: replace(dropping(draft), law=None)  # noqa: E731
    assert bias.distance(0, told) < 1e-12, "as a point draft it is exact"


@pytest.mark.parametrize(
    "policy, words",
    [
        ("specdecpp", ("acceptance head", "loss.terms acceptance")),
        ("adaflash", ("length head", "loss.terms length")),
        ("speckv", ("controller", "fit")),
    ],
)
def test_what_a_drafter_or_a_call_lacks_is_told(policy, words):
    drafter = AssistantDrafter.from_model(tiny_llama(3), policy=policy)
    with pytest.raises(ValueError) as error:
        tiny_llama().generate(**prompts(1), assistant_model=drafter, max_new_tokens=4)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "policy, words",
    [
        ({"name": "hf_threshold", "threshold": 1.5}, ("threshold", "1.5")),
        ({"name": "svip", "threshold": -1}, ("threshold", "-1")),
        ({"name": "kangaroo", "threshold": 2}, ("threshold", "2")),
        ({"name": "kangaroo", "threshold": "high"}, ("kangaroo", "threshold='high'", "wrong kind")),
        ({"name": "confidence", "threshold": 2}, ("threshold", "2")),
        ({"name": "specdecpp", "shortest": 0}, ("shortest", "0")),
        ({"name": "adaflash", "rate": 0}, ("rate", "0")),
        ({"name": "adl", "k_min": 5, "k_max": 4}, ("k_min 5", "k_max 4")),
        ({"name": "d_cut", "ratios": [0.0]}, ("ratios", "0.0")),
        ({"name": "forespark", "explore": 0}, ("explore", "0")),
        ({"name": "failfast", "max_draft": 0}, ("max_draft", "0")),
        ({"name": "speckv", "lengths": [0]}, ("lengths", "0")),
        ({"name": "speckv", "controller": {"outer": [1]}}, ("controller", "fit")),
        ({"name": ["svip"]}, ("one of", "svip")),
    ],
    ids=str,
)
def test_impossible_options_are_refused_with_the_config(policy, words):
    with pytest.raises(ValueError) as error:
        BlockConfig.tiny(policy=policy)
    assert all(word in str(error.value) for word in words)


def test_a_policy_that_is_set_later_is_checked_by_the_call():
    drafter = AssistantDrafter.from_model(tiny_llama(3))
    for drafter.config.policy, words in (("sviip", "one of auto"), ({"name": "svip", "threshold": -1}, "negative")):
        with pytest.raises(ValueError, match=words):
            tiny_llama().generate(**prompts(1), assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("name", policies.BUILT_IN)
def test_built_in_policies_may_be_written_as_a_section(name):
    model, inputs = tiny_llama(), prompts(1)
    drafter = AssistantDrafter.from_model(tiny_llama(3), policy={"name": name})
    out = model.generate(**inputs, assistant_model=drafter, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=6, do_sample=False))
