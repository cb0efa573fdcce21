"""Budgets of a batch: what is kept, at what price, before and after drafting; and that no output changes."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest
import test_sampling_law
import torch
from conftest import ScriptedDrafter, ScriptedSession, mixed, tiny_llama
from targets import padded, prompts, target
from test_sampling_law import Markov, assert_fits
from test_sampling_law import chain as drawn_chain
from torch import Tensor

from hf_specdraft import policies
from hf_specdraft.draft import Draft, Law
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.policies import FixedLength, Situation, costs
from hf_specdraft.policies.budgets import Growth, prefixes, ranked
from hf_specdraft.policies.costs import PassTimes, Prices
from hf_specdraft.policies.d_cut import kept_drafts
from hf_specdraft.policies.forespark import ForeSpark
from hf_specdraft.trees import prune

R, D = 3, 4


def falling(rows: int, width: int, seed: int, levels: int | None = None) -> Tensor:
    """Random survivals; from few levels, so that some are equal."""
    draw = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if levels:
        draw = (draw * levels).round() / levels
    return draw.cumprod(1)


def confident(survival: Tensor, kind: str = "prior", law: Law | None = None) -> Draft:
    """A chain a row of these survivals, as long as they are not negative."""
    lengths = (survival >= 0).sum(1).tolist()
    tokens = torch.zeros(survival.shape, dtype=torch.long)
    return Draft.chain(tokens, lengths, confidence=survival.float(), confidence_kind=kind, law=law)


def law_of(draft: Draft) -> Law:
    return Law(torch.full((*draft.shape, 2), 0.5), None, torch.ones(draft.shape[0], dtype=torch.bool))


def priced(node: float = 0.0, plain: float = 1.0, draft: float = 0.0, packed: bool = False) -> Prices:
    """In plain passes of one row: every token beyond each row's first costs `node`."""
    return Prices(
        PassTimes({}, lambda rows, tokens, context: plain + node * rows * (tokens - 1)),
        PassTimes({}, lambda rows, depth, context: draft),
        packed,
    )


@cache
def pair(length: int):
    return tiny_llama(), BlockDrafter(BlockConfig.tiny(block_size=length + 1, num_assistant_tokens=length))


def made(name: str, prices: Prices, batch: int = R, length: int = D, **options):
    """A policy of `batch` rows with these prices."""
    situation = Situation(*pair(length), batch, 16, FixedLength(length, batch=batch), sampled=True)
    policy = policies.make({"name": name, **options}, situation)
    policy.prices = prices
    return policy


def lengths(draft: Draft) -> list[int]:
    return draft.valid.sum(1).tolist()


# what is kept ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [None, 3])
def test_the_likeliest_entries_are_prefixes_and_the_best_there_are(levels):
    for seed in range(8):
        survival = falling(R, D, seed, levels)
        for count in range(R * D + 1):
            taken = prefixes(survival, count)
            assert sum(taken) == count
            value = sum(survival[r, :n].sum() for r, n in enumerate(taken))
            best = survival.flatten().sort(descending=True).values[:count].sum()  # of any set, prefix-closed or not
            assert value == pytest.approx(float(best))


def test_what_is_not_there_is_not_kept():
    survival = torch.tensor([[0.9, -1.0, -1.0], [-1.0, -1.0, -1.0], [0.5, 0.4, 0.3]])
    assert prefixes(survival, 99) == [1, 0, 3]
    assert Growth(survival, packed=False).lengths(2) == [1, 0, 2]
    assert Growth(torch.full((2, 0), -1.0), packed=False).lengths(0) == [0, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_growth_is_the_best_way_to_spend(packed):
    """Brute force over all lengths of three rows: the step with the greatest rate is the best there is."""
    for seed in range(10):
        survival = falling(R, 3, seed)
        growth = Growth(survival, packed)
        assert growth.expected == sorted(growth.expected)

        def rate(nodes: list[int], survival=survival) -> float:
            tokens = R + sum(float(survival[r, :n].sum()) for r, n in enumerate(nodes))
            return tokens / (1 + 0.15 * (sum(nodes) if packed else R * max(nodes)))

        step = growth.best(lambda n, growth=growth: (R + growth.expected[n]) / (1 + 0.15 * R * growth.nodes(n)))
        assert rate(growth.lengths(step)) == pytest.approx(max(map(rate, itertools.product(range(4), repeat=R))))


def test_ties_do_not_depend_on_later_tokens():
    """Rows 0 and 1 equal in their first entry: which comes first must be the same whatever row 0 says of its second."""
    for later in (0.5, 0.2):
        assert prefixes(torch.tensor([[0.5, later], [0.5, 0.1]]), 1) == [1, 0]
    assert prefixes(torch.tensor([[0.5, 0.5], [0.5, 0.1]]), 2) == [1, 1]


def test_trees_keep_parents():
    parents = torch.tensor([[-1, -1, 1, 0]])
    draft = Draft(
        torch.tensor([[1, 2, 3, 4]]),
        parents,
        torch.ones(1, 4, dtype=torch.bool),
        confidence=torch.tensor([[0.3, 0.6, 0.5, 0.1]]),
    )
    survival, rank = ranked(draft)
    assert survival[0].tolist() == pytest.approx([0.6, 0.5, 0.3, 0.1]) and rank[0].tolist() == [2, 0, 1, 3]
    policy = made("d_cut", priced(packed=True), batch=1, mode=0.6)
    kept = policy.cut(draft, [True])
    assert kept.tokens.tolist() == [[2, 3]] and kept.parents.tolist() == [[-1, 0]]


# prices ---------------------------------------------------------------------------------------------------------------


def test_prices_lie_on_lines_between_powers_of_two_and_never_fall():
    asked = []

    def measure(rows, tokens, context):
        asked.append((rows, tokens, context))
        return 1 + 0.1 * rows * tokens + 0.001 * rows * context

    times = PassTimes({}, measure)
    assert times.seconds(4, 3, 96) == pytest.approx(1 + 1.2 + 0.384)
    assert set(asked) == {(4, 2, 16), (4, 4, 16), (4, 2, 64), (4, 4, 64)}, "only what is needed is measured"
    assert times.seconds(4, 3, 127) == pytest.approx(times.seconds(4, 3, 96), rel=0.1) and len(asked) == 4
    assert times.seconds(3, 5, 1000) == pytest.approx(1 + 1.5 + 3.0)
    assert len(asked) == len(set(asked))
    noisy = PassTimes({(1, 1, 16): 2.0, (1, 2, 16): 1.0, (1, 4, 16): 3.0}, None)
    assert [noisy.seconds(1, tokens, 16) for tokens in (1, 1.5, 2, 3, 4)] == [2.0, 2.0, 2.0, 2.5, 3.0]


def test_profile_measures_passes_over_a_cache(monkeypatch):
    model = tiny_llama()
    seen, forward = [], model.forward

    def spy(*args, **kwargs):
        seen.append((tuple(kwargs["input_ids"].shape), kwargs["cache"].get_seq_length()))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    state = torch.get_rng_state()
    assert costs.profile(model, 3, 5, 64, repeats=2) > 0
    assert seen == [((3, 1), 0), *[((3, 6), 64)] * 3]
    assert torch.equal(state, torch.get_rng_state()), "a seed's draws stay what they are"


@pytest.mark.parametrize("name", ["mistral", "gpt2", "gemma2", "bloom"])
def test_profile_serves_targets_of_other_kinds(name):
    assert costs.profile(target(name), 2, 2, 32, repeats=1) > 0


def test_prices_are_kept_in_a_file_and_belong_to_what_they_were_measured_for(tmp_path, monkeypatch):
    model, drafter = tiny_llama(), BlockDrafter(BlockConfig.tiny())
    measured = []
    monkeypatch.setattr(costs, "profile", lambda *point: measured.append(point) or 0.5 * len(measured))
    situation = Situation(model, drafter, 2, 16, FixedLength(3, batch=2), sampled=True)
    file = tmp_path / "prices.json"
    first = costs.prices_of(situation, file).verify(2, 3, 16)
    assert len(measured) == 1 and json.loads(file.read_text())["passes"] == [[2, 4, 16, 0.5]]
    costs._points.clear()  # another process
    assert costs.prices_of(situation, file).verify(2, 3, 16) == first and len(measured) == 1
    other = Situation(tiny_llama(vocab=32), drafter, 2, 16, FixedLength(3, batch=2))
    with pytest.raises(ValueError, match="holds prices of .* name another file"):
        costs.prices_of(other, file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a file of prices .*delete it"):
        costs.prices_of(situation, file)


def test_prices_of_drawn_drafts_are_not_measured(monkeypatch):
    monkeypatch.setattr(costs, "profile", lambda *point: pytest.fail("a seed would give other texts elsewhere"))
    drafter = BlockDrafter(BlockConfig.tiny())
    prices = costs.prices_of(Situation(tiny_llama(), drafter, 2, 16, FixedLength(3, batch=2), sampled=True))
    assert prices.verify(2, 0, 16) < prices.verify(2, 3, 16) and prices.draft(2, 3) > 0 == prices.draft(2, 0)


# D-Cut ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio, kept", [(0.25, 0), (0.26, 1), (0.6, 2), (1.0, 3)])
def test_d_cut_counts_anchors_in_its_ratio(ratio, kept):
    assert kept_drafts(1, 4, ratio) == kept


def test_d_cut_follows_the_prices():
    draft = confident(falling(R, D, 0))
    assert lengths(made("d_cut", priced(packed=True)).cut(draft, [True] * R)) == [D] * R  # flat
    steep = priced(node=1.0, plain=0.01, packed=True)
    shallow = made("d_cut", steep, ratios=[0.25, 0.5, 1.0]).cut(draft, [True] * R)
    assert sum(lengths(shallow)) == kept_drafts(R, 1 + D, 0.25) == 1
    assert lengths(shallow) == prefixes(falling(R, D, 0).float(), sum(lengths(shallow)))
    # A cut that saves next to nothing is none.
    assert lengths(made("d_cut", priced(node=0.001, packed=True), min_saving=0.12).cut(draft, [True] * R)) == [D] * R
    # With the anchors counted, cutting deeper pays.
    weighed = [made("d_cut", priced(node=0.3, packed=True), counts_anchors=c) for c in (False, True)]
    assert sum(lengths(weighed[1].cut(draft, [True] * R))) < sum(lengths(weighed[0].cut(draft, [True] * R)))


def test_d_cut_fills_the_rectangle():
    """What fits beside the longest row is verified at no cost."""
    survival = torch.tensor([[0.9, 0.8, 0.7, 0.1], [0.6, 0.1, 0.1, 0.1], [0.5, 0.1, -1.0, -1.0]])
    draft = confident(survival)
    assert lengths(made("d_cut", priced(packed=True), mode=0.5).cut(draft, [True] * R)) == [3, 1, 1]
    assert lengths(made("d_cut", priced(), mode=0.5).cut(draft, [True] * R)) == [3, 3, 2]


def test_d_cut_counts_rows_that_go_on():
    """A finished row that cannot leave the pass earns the others no nodes, but is paid for."""
    survival = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2], [-1.0, -1.0, -1.0, -1.0]])
    policy = made("d_cut", priced(packed=True), mode=0.5)
    assert sum(lengths(policy.cut(confident(survival), [True, True, False]))) == kept_drafts(2, 1 + D, 0.5) == 3
    asked = []
    policy = made("d_cut", priced(packed=True))
    policy.prices.passes.seconds = lambda rows, *_: asked.append(rows) or 1.0
    policy.cut(confident(survival), [True, True, False])
    assert set(asked) == {3}


def test_d_cut_makes_point_rows_of_what_it_looked_at():
    for kind, stays in (("prior", True), ("pre", False), ("own", False)):
        draft = confident(falling(R, D, 0), kind)
        draft.law = law_of(draft)
        assert (made("d_cut", priced(node=1.0, plain=0.01)).cut(draft, [True] * R).law is not None) == stays


# DSpark ---------------------------------------------------------------------------------------------------------------

P, Q = (0.7, 0.3), (0.5, 0.5)


def joint(policy, table: Tensor, demote: bool | None = None) -> Tensor:
    """[2] the law of the first token of row 0, exactly, in a batch of two rows whose drafts are two tokens long, drawn
    from Q, verified against P by rejection. table: [2, 2, 2] confidence of row 0's second token by (its first, row 1's
    first), and of row 1's by (its first, row 0's first)."""
    out = torch.zeros(2, dtype=torch.float64)
    for x, y in itertools.product(range(2), repeat=2):
        first = 0.6
        survival = torch.tensor([[first, first * table[0, x]], [first, first * table[1, y]]])
        draft = confident(survival, "pre")
        draft.tokens = torch.tensor([[x, 0], [y, 0]])
        draft.law = law_of(draft)
        kept = policy.cut(draft, [True, True])
        weight = Q[x] * Q[y]
        drawn = kept.law is not None
        if not lengths(kept)[0]:
            out += weight * torch.tensor(P, dtype=torch.float64)
            continue
        accept = min(1.0, P[x] / Q[x]) if drawn else P[x]
        rest = torch.tensor(P, dtype=torch.float64) - (torch.tensor(Q) if drawn else torch.eye(2)[x] * P[x])
        rest = rest.clamp(min=0)
        out[x] += weight * accept
        out += weight * (1 - accept) * (rest / rest.sum() if rest.sum() else torch.tensor(P))
    return out


@pytest.mark.parametrize("name", ["dspark_batch", "forespark"])
def test_an_early_stop_keeps_the_law(name, monkeypatch):
    """A first column alone does not pay; a second one does where a row's second token is sure: after an A."""
    seconds = {1: 1.0, 2: 1.7, 4: 1.8}  # of one, two, three columns: on a line between the last two
    table = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    prices = Prices(PassTimes({}, lambda rows, tokens, context: seconds[tokens]), PassTimes({}, lambda *a: 0.0))
    assert joint(made(name, prices, batch=2, length=2), table).tolist() == pytest.approx(P)
    best = Growth.best
    monkeypatch.setattr(Growth, "best", lambda self, rate, last=None, stops_early=False: best(self, rate, last))
    looking_on = joint(made(name, prices, batch=2, length=2), table)
    assert looking_on[0] == pytest.approx(0.775), "only two Bs are dropped unseen"


def test_an_early_stop_does_not_look_past_what_brings_nothing():
    """Were the third entry to decide whether the second is verified, the second's token, which it has seen, would."""
    growth = Growth(torch.tensor([[1.0, 1.0, 1.0]]), packed=True)
    rates = [1.0, 2.0, 2.0, 3.0]
    assert growth.best(rates.__getitem__, stops_early=True) == 1 and growth.best(rates.__getitem__) == 3


def test_dspark_makes_point_rows_of_confidences_that_saw_their_own_tokens():
    for kind, stays in (("prior", True), ("pre", True), ("own", False)):
        draft = confident(falling(R, D, 0), kind)
        draft.law = law_of(draft)
        assert (made("dspark_batch", priced(node=0.3, packed=True)).cut(draft, [True] * R).law is not None) == stays


def test_dspark_counts_rows_that_go_on():
    """A finished row gets no token of the pass: what is gained then weighs more."""
    draft = confident(torch.tensor([[0.5, 0.1], [-1.0, -1.0]]))
    for going, kept in (([True, False], [1, 0]), ([True, True], [0, 0])):
        policy = made("dspark_batch", priced(node=0.4, packed=True), batch=2, length=2)
        assert lengths(policy.cut(draft, going)) == kept


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["d_cut", "dspark_batch", "forespark"])
def test_drawn_rows_keep_the_law_at_any_price(name, packed):
    cuts = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        table = torch.rand(2, 2, generator=generator)
        steps = (0.5 * torch.rand(8, generator=generator)).cumsum(0).tolist()
        seconds = PassTimes({}, lambda rows, tokens, context, steps=steps: 1 + steps[int(tokens)])
        policy = made(name, Prices(seconds, PassTimes({}, lambda *a: 0.0), packed), batch=2, length=2)
        policy.before([0, 1])
        inner = policy.cut

        def cut(draft, going, inner=inner):
            nonlocal cuts
            kept = inner(draft, going)
            cuts += kept.law is None or lengths(kept) != [2, 2]
            return kept

        policy.cut = cut
        assert joint(policy, table).tolist() == pytest.approx(P)
    assert cuts


def test_a_cut_by_own_tokens_is_biased_unless_it_makes_point_rows():
    """p = (.7, .3), q = (.5, .5), only A is admitted: .85 if the row stays drawn."""

    class OwnToken:
        def cut(self, draft, going):
            keep = (draft.tokens[:, :1] == 0).expand(draft.shape)
            return prune(draft, keep, looked_at_token=self.looked)

    policy = OwnToken()
    for policy.looked, first in ((False, 0.85), (True, 0.70)):
        assert float(joint(policy, torch.ones(2, 2))[0]) == pytest.approx(first)


# ForeSpark ------------------------------------------------------------------------------------------------------------


def planned(policy, survival: Tensor) -> list[int]:
    """The lengths of a round that does not explore."""
    policy._rounds = 1
    return policy.before(list(range(len(survival))), lambda: survival)


def test_forespark_limits():
    survival = falling(R, D, 1)
    assert planned(made("forespark", priced(packed=True)), survival) == [D] * R  # nothing costs anything
    assert planned(made("forespark", priced(node=0.9, packed=True)), survival) == [0] * R
    # One row that is sure among others that are not.
    survival = torch.tensor([[0.95, 0.9, 0.85, 0.8], [0.05, 0.01, 0.0, 0.0], [0.05, 0.01, 0.0, 0.0]])
    assert planned(made("forespark", priced(node=0.15, packed=True)), survival) == [D, 0, 0]
    # The rectangle: the same columns for all.
    assert planned(made("forespark", priced(node=0.05)), survival) == [D] * R
    # A draft that costs more than it brings is not made.
    assert planned(made("forespark", priced(draft=3.0)), survival) == [0] * R


def test_forespark_is_never_worse_than_plain_in_its_own_model():
    for seed, draft, packed in itertools.product(range(8), (0.0, 0.3, 2.0), (False, True)):
        prices = priced(node=0.12, draft=draft, packed=packed)
        policy = made("forespark", prices)
        survival = falling(R, D, seed)
        chosen = planned(policy, survival)
        nodes = sum(chosen) / R if packed else max(chosen)
        tokens = R + sum(float(survival[r, :n].sum()) for r, n in enumerate(chosen))
        seconds = prices.verify(R, nodes, 16) + prices.draft(R, max(chosen))
        assert tokens / seconds >= R / prices.verify(R, 0, 16) - 1e-9


def test_forespark_counts_each_row_where_nobody_tells():
    policy = made("forespark", priced(node=0.2, packed=True), length=8)
    assert policy.before([0, 1, 2]) == [8] * 3, "the first round explores"
    for _ in range(20):
        policy.observe([0, 1, 2], [8, 8, 8], [[1] * 9, [1] * 3, [1]])
    policy._rounds = 1
    first, second, third = policy.before([0, 1, 2])
    assert first == 8 > second >= third == 0
    # A draft that ended before it failed says nothing of what would have followed.
    cut = made("forespark", priced(node=0.2, packed=True), length=8)
    for _ in range(40):
        cut.observe([0, 1, 2], [2, 2, 2], [[1] * 3, [1] * 3, [1] * 3])
    cut._rounds = 1
    assert cut.before([0, 1, 2]) == [8] * 3


def test_forespark_explores_now_and_then():
    policy = made("forespark", priced(node=9.0), explore=10)
    asked = [max(policy.before([0, 1, 2], lambda: torch.full((R, D), 0.01))) for _ in range(30)]
    assert [n for n, length in enumerate(asked) if length] == [0, 10, 20]


def test_forespark_drafts_more_where_choosing_has_gained():
    policy = made("forespark", priced(node=0.1, packed=True), kappas=(1.0, 1.5), length=8)
    before = torch.tensor([[0.6**n for n in range(1, 9)]] * R)
    few = sum(planned(policy, before))
    # Of equal rows one always turns out sure, and the others do not.
    after = torch.tensor([[0.99**n for n in range(1, 9)], *[[0.1**n for n in range(1, 9)]] * 2])
    for n in range(60):
        policy.before(list(range(R)), lambda: before)
        policy.cut(confident(after.roll(n % R, 0)), [True] * R)
    assert policy.gains[1.5] > 1.05
    more = planned(policy, before)
    drafted = confident(torch.where(torch.arange(8) < torch.tensor(more)[:, None], after, -1.0))
    kept = lengths(policy.cut(drafted, [True] * R))
    assert sum(more) > few and sum(kept) <= policy._budget < sum(more)


def test_forespark_verifies_no_more_than_planned():
    """Though all that was drafted beyond it turns out sure."""
    policy = made("forespark", priced(node=0.1, packed=True), kappas=(1.0, 1.5), length=8)
    policy.gains[1.5] = 1.3
    drafted = planned(policy, torch.tensor([[0.6**n for n in range(1, 9)]] * R))
    sure = torch.where(torch.arange(8) < torch.tensor(drafted)[:, None], 0.99, -1.0)
    assert sum(lengths(policy.cut(confident(sure), [True] * R))) == policy._budget < sum(drafted)


def test_forespark_leaves_drawn_rows_whose_confidence_saw_their_tokens():
    draft = confident(falling(R, D, 0) * 0.01, "own")
    draft.law = law_of(draft)
    policy = made("forespark", priced(node=0.5))
    policy.before([0, 1, 2])
    assert policy.cut(draft, [True] * R) is draft
    pre = made("forespark", priced(node=0.5))
    pre.before([0, 1, 2])
    kept = pre.cut(confident(falling(R, D, 0) * 0.01, "pre", draft.law), [True] * R)
    assert lengths(kept) == [0] * R and kept.law is not None


# end to end -----------------------------------------------------------------------------------------------------------

POLICIES = [
    {"name": "d_cut", "min_saving": 0.0},
    {"name": "d_cut", "mode": 0.5, "packed": True},
    "dspark_batch",
    {"name": "forespark", "explore": 3},
    {"name": "forespark", "explore": 3, "packed": True},
]


@cache
def block_drafter(policy: str) -> BlockDrafter:
    """A drafter of random weights, which drafts tokens of its own reduced vocabulary."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return BlockDrafter(BlockConfig.tiny(policy=json.loads(policy), predraft={})).eval()


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_texts_are_the_same_with_budgets(policy, batch, monkeypatch):
    """Left-padded batches, at prices so that every choice is met."""
    nodes_cost = itertools.cycle([0.0, 0.3, 1.5, 0.02])
    family = policies.known()[policy if isinstance(policy, str) else policy["name"]]
    before = family.before

    def at_another_price(self, *args):
        node = next(nodes_cost)
        self.prices = Prices(
            PassTimes({}, lambda rows, tokens, context: 1 + node * (tokens - 1)),
            PassTimes({}, lambda rows, depth, context: 0.01),
            self.prices.packed,
        )
        return before(self, *args)

    monkeypatch.setattr(family, "before", at_another_price)
    model, inputs = tiny_llama(), padded(prompts(tuple(3 + 2 * (b % 4) for b in range(batch))))
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answers = [row[mask.argmax() :].tolist() for row, mask in zip(plain, inputs["attention_mask"])]
    scripted = RatedDrafter(answers, [mixed(4)], 4)
    scripted.config.policy = policy
    for drafter in (scripted, block_drafter(json.dumps(policy))):
        out = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, plain)
        assert 0 < out.speculation.verified < out.speculation.tau * 24 * batch * 4
        if drafter is scripted:
            assert out.speculation.accepted > 0


class RatedSession(ScriptedSession):
    """Its confidences are as good as random, and differ from row to row."""

    def propose(self, context):
        draft = super().propose(context)
        generator = torch.Generator().manual_seed(sum(self.rounds))
        draft.confidence = torch.rand(draft.shape, generator=generator).cumprod(1)
        return draft


class RatedDrafter(ScriptedDrafter):
    def start(self, view, batch):
        return RatedSession(self, batch)


def test_rows_of_one_pass_draft_different_lengths():
    """0 among them; and a block drafter's head sees no slot beyond a row's length."""
    model, drafter = tiny_llama(), block_drafter('"forespark"')
    inputs = padded(prompts((8, 5, 11)))
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    asked, heads = [], []

    def uneven(self, rows, outlook=None):
        told = outlook()
        assert told.shape == (len(rows), drafter.config.num_drafts) and bool((told.diff(dim=1) <= 0).all())
        asked.append([(row + len(asked)) % 3 for row in rows])
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForeSpark, "before", uneven)
        patch.setattr(ForeSpark, "cut", lambda self, draft, going: draft)
        logits = drafter.logits
        patch.setattr(
            drafter, "logits", lambda view, hidden: heads.append(hidden[..., 0].numel()) or logits(view, hidden)
        )
        out = model.generate(
            **inputs, max_new_tokens=20, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
    assert torch.equal(out.sequences, plain)
    assert any(len(set(lengths)) > 1 and 0 in lengths for lengths in asked)
    assert max(heads) <= 3 and sum(heads) == out.speculation.drafted, "rows of 0, 1 and 2 slots"


def rated_chain(scores, context):
    """A drawn chain whose confidences had seen the tokens before their own."""
    draft = drawn_chain()(scores, context)
    own = draft.law.probs.gather(-1, draft.tokens[..., None])[..., 0]
    draft.confidence = torch.nn.functional.pad(own[:, :-1], (1, 0), value=0.4).cumprod(1)
    draft.confidence_kind = "pre"
    return draft


@pytest.mark.parametrize("policy", ["d_cut", "dspark_batch", "forespark"])
def test_sampled_law(policy, monkeypatch):
    """Chi-square, in the default mode, at prices where rows get drafts of different lengths."""
    monkeypatch.setattr(test_sampling_law, "ROWS", 2000)
    monkeypatch.setattr(Prices, "verify", lambda self, rows, nodes, context: 1 + 0.25 * nodes)
    monkeypatch.setattr(Prices, "draft", lambda self, rows, depth: 0.0)
    stats = assert_fits(Markov(rated_chain, policy={"name": policy, "packed": True}), "all_warpers")
    assert stats.verified < stats.drafted


# options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, message",
    [
        ({"name": "d_cut", "mode": 1.5}, "mode must be 'auto' or a ratio"),
        ({"name": "d_cut", "mode": "always"}, "mode must be 'auto' or a ratio"),
        ({"name": "d_cut", "ratios": [0.0]}, "ratios must be in"),
        ({"name": "forespark", "kappas": [1.5]}, "kappas must be at least 1, and 1 among them"),
        ({"name": "forespark", "explore": 0}, "explore must be at least 1"),
    ],
    ids=str,
)
def test_options_are_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        made(policy.pop("name"), priced(), **policy)
