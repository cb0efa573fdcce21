"""SpecKV's controller: what it chooses at which costs, what it learns, and that it decides by the past alone."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from scripted import prompts

from hf_specdraft.draft import Partial
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.policies import Costs, FixedLength, base
from hf_specdraft.policies.speckv import (
    FEATURES,
    Controller,
    Record,
    SpecKV,
    best_length,
    collect,
    compression_of,
    fit,
)

OPTIONS = (2, 4, 6, 8)


def tokens_at(alpha: float, deepest: int = 8) -> torch.Tensor:
    """To expect of rounds whose drafted tokens are each accepted with chance alpha."""
    return torch.tensor([[sum(alpha**i for i in range(n + 1)) for n in range(deepest + 1)]])


def seconds(node: float, step: float) -> list[float]:
    return [1 + n * (node + step) for n in range(9)]


def test_free_drafts_are_long_and_dear_ones_short():
    assert best_length(tokens_at(0.7), seconds(0, 0), OPTIONS) == [8]
    assert best_length(tokens_at(0.7), seconds(0, 1.0), OPTIONS) == [2]


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9, 0.98])
@pytest.mark.parametrize("step", [0.02, 0.1, 0.3])
def test_the_choice_is_the_best_at_exact_chances(alpha, step):
    rates = {n: (1 - alpha ** (n + 1)) / (1 - alpha) / (1 + n * step) for n in OPTIONS}
    assert best_length(tokens_at(alpha), seconds(0, step), OPTIONS) == [max(rates, key=rates.get)]


# What the repository's results hold: tokens per round and tokens per second by length, of one target three times.
PER_ROUND = (2.6, 3.8, 4.6, 5.2)
PER_SECOND = {
    "fp16": (64.4, 62.0, 57.8, 53.6),
    "int8": (23.7, 28.5, 31.2, 31.5),
    "nf4": (45.5, 48.8, 47.8, 45.8),
}


@pytest.mark.parametrize("target, best", [("fp16", 2), ("int8", 8), ("nf4", 4)])
def test_the_published_data_ask_for_another_length_by_the_targets_cost(target, best):
    tokens, took = torch.zeros(1, 9), [1.0] * 9
    for length, given, rate in zip(OPTIONS, PER_ROUND, PER_SECOND[target]):
        tokens[0, length], took[length] = given, given / rate
    assert best_length(tokens, took, OPTIONS) == [best]
    assert OPTIONS[max(range(4), key=PER_ROUND.__getitem__)] == 8, "what tokens per round would always ask for"


def records(seed: int = 0, count: int = 600) -> list[Record]:
    """Rounds of two kinds of context: sure ones, whose tokens hold with 0.95, and unsure ones, 0.3."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        sure = bool(torch.rand((), generator=generator) < 0.5)
        length = OPTIONS[i % 4]
        noise = 0.1 * torch.rand(2, generator=generator)
        features = [float(0.3 + noise[0]), float(0.9 - noise[1]), 0.5, 0.8, 0.0]
        if not sure:
            features = [float(2.0 + noise[0]), float(0.3 - noise[1]), 2.5, 0.2, 0.0]
        holds = torch.rand(length, generator=generator) < (0.95 if sure else 0.3)
        made.append(Record(features, length, int(holds.long().cumprod(0).sum())))
    return made


@pytest.fixture(scope="module")
def controller() -> Controller:
    return fit(records())


def test_a_fitted_controller_tells_contexts_apart(controller):
    sure, unsure = (torch.tensor([f]) for f in ([0.35, 0.85, 0.5, 0.8, 0.0], [2.05, 0.25, 2.5, 0.2, 0.0]))
    for features, alpha in ((sure, 0.95), (unsure, 0.3)):
        assert (controller.expected(features, 8) - tokens_at(alpha)).abs().max() < 0.6
    cost = seconds(0.02, 0.1)
    assert best_length(controller.expected(torch.cat((sure, unsure)), 8), cost, OPTIONS) == [8, 2]


def test_features_pay_against_the_best_fixed_length(controller):
    """Tokens per second on other rounds, by the true chances; constant features do no better than one length."""
    cost, rounds = seconds(0.02, 0.1), records(seed=1, count=200)
    truth = [tokens_at(0.95 if r.features[0] < 1 else 0.3)[0] for r in rounds]

    def rate(lengths):
        return float(sum(t[n] for t, n in zip(truth, lengths)) / sum(cost[n] for n in lengths))

    features = torch.tensor([r.features for r in rounds])
    chosen = best_length(controller.expected(features, 8), cost, OPTIONS)
    fixed = max(rate([n] * len(rounds)) for n in OPTIONS)
    constant = fit([Record([0.0] * 5, r.drafted, r.accepted) for r in records()])
    blind = best_length(constant.expected(torch.zeros(len(rounds), 5), 8), cost, OPTIONS)
    assert rate(blind) <= fixed * 1.001 < rate(chosen)


def test_a_controller_goes_through_json(controller):
    again = Controller.of(json.loads(json.dumps(controller.to_dict())))
    features = torch.rand(3, len(FEATURES) - 1)
    assert torch.equal(again.expected(features, 8), controller.expected(features, 8))
    with pytest.raises(ValueError, match="fit"):
        Controller.of({"inner.bias": [0.0]})
    with pytest.raises(ValueError, match="collect"):
        fit([])


def test_a_round_is_chosen_by_the_rounds_before_it(controller):
    situation = base.Situation(SimpleNamespace(), SimpleNamespace(is_sequential=True), 2, 8, FixedLength(8, batch=2))
    situation.costs = lambda depth: Costs({0: 1.0, 8: 1.16}, 0.1 * depth)
    policy = SpecKV(situation, controller.to_dict())
    assert policy.before([0, 1]) == [4, 4]
    sure, unsure = torch.zeros(2, 8).index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(4.5))
    for step in (1, 2, 3):
        policy.more(Partial(step, torch.zeros(2, dtype=torch.long), torch.stack((sure, unsure))))
    policy.observe([0, 1], [4, 4], [[1] * 5, [1]])
    assert policy.before([0, 1]) == [8, 2]
    assert policy.before([1]) == [2], "by row, whoever has left"


def test_features_are_those_published():
    """Entropy (nats) and largest probability of the tokens offered, their means and worst ones, in running means."""
    target = SimpleNamespace(is_loaded_in_4bit=True)
    situation = base.Situation(target, SimpleNamespace(is_sequential=True), 1, 8, FixedLength(4))
    situation.costs = lambda depth: Costs()
    policy, told = SpecKV(situation, lengths=(4,)), []
    even, sure = [0.25] * 4, [0.7, 0.1, 0.1, 0.1]
    nats = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1))
    # The third token was cut: it tells nothing.
    for laws in ((even, sure, [0.97, 0.01, 0.01, 0.01]), (sure, sure)):
        policy.before([0])
        for step, law in enumerate(laws, 1):
            policy.more(Partial(step, torch.zeros(1, dtype=torch.long), torch.tensor([law]).log()))
        policy.observe([0], [2], [[1, 1]])
        told.append(policy._features[0].tolist())
    first = [(math.log(4) + nats) / 2, (0.25 + 0.7) / 2, math.log(4), 0.25, 2.0]
    assert told[0] == pytest.approx(first)
    assert told[1] == pytest.approx([(old + new) / 2 for old, new in zip(first, [nats, 0.7, nats, 0.7, 2.0])])
    codes = [compression_of(SimpleNamespace(**{f"is_loaded_in_{bits}bit": True})) for bits in (16, 8, 4)]
    assert codes == [0, 1, 2]


def test_more_tokens_are_never_accepted_more_often():
    """Whatever the weights say of levels."""
    rising = Controller()
    with torch.no_grad():
        rising.inner.weight.zero_()[:, -1] = 1.0
        rising.inner.bias.zero_()
        rising.outer.weight.fill_(0.1)
        rising.outer.bias.fill_(-3.0)
    gains = rising.expected(torch.zeros(1, 5), 8).diff(dim=1)
    assert (gains.diff(dim=1) <= 1e-6).all() and gains[0, -1] == pytest.approx(float(gains[0, 0]), abs=1e-5)


@pytest.mark.parametrize("family", ["assistant", "block"])
def test_collect_fit_and_decode(family):
    target, inputs = tiny_llama(), prompts(2)
    if family == "assistant":
        drafter = AssistantDrafter.from_model(tiny_llama(), policy="fixed")
    else:
        drafter = BlockDrafter(BlockConfig.tiny(policy="fixed", num_assistant_tokens=2)).eval()
    lengths = (1, 3) if family == "block" else (2, 4)
    found = collect(target, drafter, [inputs], lengths, max_new_tokens=20, do_sample=False)
    assert drafter.config.policy == "fixed"
    assert {r.drafted for r in found} >= set(lengths) and all(len(r.features) == 5 for r in found)
    if family == "assistant":
        assert all(r.accepted == r.drafted for r in found[:4]), "the target itself is always right"
    weights = fit(found, steps=20).to_dict()
    drafter.config.policy = {"name": "speckv", "controller": weights, "lengths": list(lengths)}
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, max_new_tokens=20, do_sample=False), plain)


def test_what_short_drafts_take_is_no_price_of_long_ones():
    """While costs are measured it drafts 4 tokens, others as many as the call asks for: each has a record of its own,
    and both tell the same of a draft of 8 tokens."""
    target, drafter = tiny_llama(), AssistantDrafter.from_model(tiny_llama(3))
    situation = base.Situation(target, drafter, 1, 8, FixedLength(8))
    others, policy = situation.costs(), SpecKV(situation, Controller().to_dict())
    assert policy.before([0]) == [4]
    for costs, drafted in ((policy.costs, 4), (others, 8)):
        while not costs.hear(drafted, 1.0, 0.1 * drafted):
            pass
        costs.settle({0: 1.0})
    assert policy.seconds(8) == pytest.approx(others.seconds(8) + others.draft) == pytest.approx(1.8)
