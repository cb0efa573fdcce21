"""Drafting never costs much, comes back when it pays, and goes on as if it had never paused."""

from __future__ import annotations

import random
import time

import pytest
import targets
import torch
from conftest import ScriptedDrafter, adversary, mixed, oracle, tiny_llama
from scripted import Recording, prompts, scripted
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_specdraft import decoding, policies
from hf_specdraft.draft import Draft, Law
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter
from hf_specdraft.policies import Costs, FixedLength, PaysOff

K = 8
DRAFT_COSTS = [0.1, 0.5, 1.0, 5.0]


def costs(draft: float, node: float = 0.02) -> Costs:
    """In target passes; every node adds `node`."""
    return Costs({0: 1.0, K: 1.0 + K * node}, draft)


# the policy alone -----------------------------------------------------------------------------------------------------


def simulate(policy: PaysOff, tokens: int, chance) -> list[tuple[int, float, int]]:
    """Rounds (tokens so far, seconds, depth) of one row in which a drafted token at `position` holds with probability
    chance(position); the seconds are those of the policy's own costs."""
    draw = random.Random(0)
    done, rounds = 0, []
    while done < tokens:
        depth = policy.before([0])[0]
        accepted = 0
        while accepted < depth and draw.random() < chance(done + accepted):
            accepted += 1
        policy.observe([0], [depth], [[1] * (accepted + 1)])
        done += accepted + 1
        rounds.append((done, policy._seconds(depth) if depth else policy.costs.plain, depth))
    return rounds


def slowdown(rounds, after: int = 32) -> float:
    """Seconds per token after the first `after`, plain decoding's being 1."""
    late = [r for r in rounds if r[0] > after]
    return sum(seconds for _, seconds, _ in late) / (late[-1][0] - after)


@pytest.mark.parametrize("draft", DRAFT_COSTS)
@pytest.mark.parametrize("node", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("shape", ["chain", "sequential", "fixed", "tree"])
def test_useless_drafter_costs_little(draft, node, shape):
    fields = {
        "chain": {"adaptive": True},
        "sequential": {"adaptive": True, "sequential": True},
        "fixed": {},
        "tree": {"nodes": 20},
    }[shape]
    rounds = simulate(PaysOff(FixedLength(K), costs(draft, node), **fields), 400, lambda at: 0.0)
    assert slowdown(rounds) <= 1.15
    assert any(depth for _, _, depth in rounds[-200:]), "it must go on trying"


@pytest.mark.parametrize("draft", DRAFT_COSTS)
@pytest.mark.parametrize("node", [0.0, 0.05])
@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_drafter_costs_much_and_a_good_one_is_used(draft, node, chance, adaptive):
    rounds = simulate(PaysOff(FixedLength(K), costs(draft, node), adaptive=adaptive), 2000, lambda at: chance)
    # What the best choice made once and for all would take.
    policy = PaysOff(FixedLength(K), costs(draft, node))
    best = min(
        1.0,
        *(
            policy._seconds(depth) / sum(chance**i for i in range(depth + 1))
            for depth in (range(1, K + 1) if adaptive else [K])
        ),
    )
    assert slowdown(rounds) <= 1.2 * best


@pytest.mark.parametrize("draft", DRAFT_COSTS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_comes_back_when_the_text_becomes_predictable(draft, adaptive):
    policy = PaysOff(FixedLength(16), costs(draft, 0.0), adaptive=adaptive)
    rounds = simulate(policy, 3000, lambda at: float(at >= 600))
    off = [depth for done, _, depth in rounds if 100 < done <= 600]
    assert sum(map(bool, off)) <= 0.05 * len(off) / draft + 1
    back = next(done for done, _, depth in rounds if done > 600 and policy_pays(rounds, done))
    # A round is drafted every draft / spend passes, and at most four of them convince.
    assert back - 600 <= 4 * (draft / PaysOff.spend + 16) + 16
    late = [r for r in rounds if r[0] > back + 200]
    assert all(depth >= 8 for _, _, depth in late)


def policy_pays(rounds, done: int) -> bool:
    """Whether from here on every round is drafted."""
    return all(depth for at, _, depth in rounds if at >= done)


def test_depth_follows_the_gain():
    def settled(chance, **fields):
        rounds = simulate(PaysOff(FixedLength(K), **fields), 1500, lambda at: chance)
        depths = [depth for _, _, depth in rounds[-50:]]
        return sum(depths) / len(depths)

    assert settled(0.95, costs=costs(0.2, 0.0), adaptive=True) == K  # nodes cost nothing: the deeper the better
    assert settled(0.5, costs=costs(0.05, 0.2), adaptive=True) <= 3
    assert settled(0.5, costs=costs(1.6, 0.0), adaptive=True, sequential=True) <= 3
    assert settled(0.9, costs=costs(1.6, 0.0), adaptive=True, sequential=True) > 4
    assert settled(0.9, costs=costs(0.05, 0.02)) == K  # the caller's length is not touched


@pytest.mark.parametrize(("chance", "node"), [(0.5, 0.15), (0.7, 0.2)])
def test_choosing_the_depth_helps(chance, node):
    times = [
        sum(s for _, s, _ in simulate(PaysOff(FixedLength(K), costs(0.05, node), adaptive=a), 2000, lambda at: chance))
        for a in (False, True)
    ]
    assert times[1] < 0.9 * times[0]


def test_drafts_without_nodes():
    """They cost nothing when the drafter is free, and a draft each otherwise."""
    free = PaysOff(FixedLength(K), costs(0.0), free=True)
    dear = PaysOff(FixedLength(K), costs(0.5))
    for policy in (free, dear):
        for _ in range(50):
            policy.before([0])
            policy.observe([0], [0], [[1]])
    assert free.before([0]) == [K]
    assert dear.before([0]) == [0]


def test_rows_share_the_decision():
    """A row of every ten tokens accepted pays for one that accepts none, as long as the mean gains."""
    policy = PaysOff(FixedLength(K, batch=2), costs(0.5))
    for _ in range(40):
        lengths = policy.before([0, 1])
        assert lengths == [K, K]
        policy.observe([0, 1], lengths, [[1] * (K + 1), [1]])
    assert policy.gain == pytest.approx((K / 2 + 1) / policy._seconds(K), rel=0.05)
    for _ in range(24):  # the good row has ended
        policy.observe([0, 1], policy.before([0, 1]), [[], [1]])
    assert policy.gain < 1


def test_costs_are_the_least_of_what_was_measured():
    measured = Costs()
    assert not measured.hear(8, 9.0, 2.0)  # the first round warms up caches and kernels
    assert not measured.hear(8, 1.6, 0.4)
    assert measured.hear(4, 0.9, 0.5)
    assert not measured.known
    measured.settle({0: 1.0, 1: 1.2})
    assert measured.known and measured.plain == 1.0 and measured.draft == 0.4
    # A pass with a draft is never cheaper than one without.
    assert measured.passes == {0: 1.0, 1: 1.2, 4: 1.0, 8: 1.6}
    assert [measured.seconds(n) for n in (0, 1, 4, 6, 8)] == pytest.approx([1.0, 1.2, 1.0, 1.3, 1.6])
    assert measured.seconds(16) == pytest.approx(2.8)


# rated nodes ----------------------------------------------------------------------------------------------------------


def rated(confidence, parents=None, **fields) -> Draft:
    confidence = torch.tensor([confidence])
    nodes = confidence.shape[1]
    tokens = torch.arange(1, nodes + 1)[None]
    if parents is None:
        return Draft.chain(tokens, [nodes], confidence=confidence, **fields)
    return Draft(
        tokens, torch.tensor([parents]), torch.ones(1, nodes, dtype=torch.bool), confidence=confidence, **fields
    )


def decided(costs: Costs, **fields) -> PaysOff:
    """A policy beyond its first rounds."""
    policy = PaysOff(FixedLength(K), costs, **fields)
    policy.rounds = PaysOff.warm_up
    return policy


def test_only_nodes_that_earn_their_place_are_verified():
    draft = rated([0.9, 0.6, 0.05, 0.5, 0.04], parents=[-1, 0, 0, 1, 2])
    # 1.9 / 1.2 < 2.5 / 1.4 < 3 / 1.6 > 3.05 / 1.8
    kept = decided(costs(0.0, 0.2), nodes=5).cut(draft, [True])
    assert kept.tokens[kept.valid].tolist() == [1, 2, 4] and kept.parents[kept.valid].tolist() == [-1, 0, 1]
    assert decided(costs(0.0, 0.0), nodes=5).cut(draft, [True]) is draft
    assert decided(costs(0.0, 2.0), nodes=5).cut(draft, [True]).shape == (1, 0)


def test_drafts_that_must_not_be_cut():
    law = Law(torch.full((1, 2, 4), 0.25), None, torch.tensor([True]))
    drawn = {"law": law, "confidence_kind": "own"}
    dear = costs(0.0, 2.0)
    for policy, draft in (
        (PaysOff(FixedLength(K), dear), rated([0.1, 0.1])),  # nothing is decided in the first rounds
        (PaysOff(FixedLength(K), Costs()), rated([0.1, 0.1])),
        (decided(dear), rated([0.1, 0.1], **drawn)),  # its law would be lost
    ):
        assert policy.cut(draft, [True]) is draft
    before_drawing = decided(dear).cut(rated([0.1, 0.1], law=law, confidence_kind="prior"), [True])
    assert before_drawing.shape == (1, 0)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("node", [0.02, 0.1, 0.5])
def test_confident_liar_costs_little_and_is_believed_again(free, node):
    policy = PaysOff(FixedLength(K), costs(0.0 if free else 0.2, node), free=free)
    seconds, verified = [], []
    for i in range(1000):
        depth = policy.before([0])[0]
        draft = rated([0.95**level for level in range(1, depth + 1)])
        verified.append(policy.cut(draft, [True]).shape[1] if depth else 0)
        policy.observe([0], [verified[-1]], [[1] * (1 + (verified[-1] if i >= 400 else 0))])
        seconds.append(policy.costs.seconds(verified[-1]) + (policy.costs.draft if depth else 0))
    assert sum(seconds[32:400]) / len(seconds[32:400]) <= 1.15
    assert all(verified[500 if free else 900 :])


# in the loop ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fixed_costs(monkeypatch):
    """Makes every pair cost the same, known in advance."""

    def fix(draft: float, node: float = 0.02):
        monkeypatch.setattr(decoding, "costs_of", lambda *args: costs(draft, node))

    return fix


class Trace(Recording):
    """Tells, for every new token of one row, how many passes and drafts had been made."""

    def __init__(self, target):
        super().__init__()
        self.passes = self.drafts = 0
        self.at: list[tuple[int, int]] = []
        self._hook = target.model.register_forward_hook(lambda *args: setattr(self, "passes", self.passes + 1))

    def watch(self, drafter):
        start = type(drafter).start

        def watching(view, batch):
            session = start(drafter, view, batch)
            propose = session.propose

            def counting(context):
                self.drafts += 1
                return propose(context)

            session.propose = counting
            return session

        drafter.start = watching
        return drafter

    def put(self, value):
        super().put(value)
        if len(self.puts) > 1:
            self.at.append((self.passes, self.drafts))

    def end(self):
        super().end()
        self._hook.remove()


@pytest.mark.parametrize("draft", DRAFT_COSTS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("batch", [1, 3])
def test_adversary_is_switched_off(draft, tree, batch, fixed_costs):
    fixed_costs(draft)
    target, inputs = tiny_llama(), prompts(batch)
    plain = target.generate(**inputs, max_new_tokens=160, do_sample=False)
    answers = [row[mask.argmax() :].tolist() for row, mask in zip(plain, inputs["attention_mask"])]
    drafter = ScriptedDrafter(answers, [adversary], K, tree)
    drafter.config.policy = "auto"
    trace = Trace(target)
    out = target.generate(
        **inputs,
        assistant_model=trace.watch(drafter),
        max_new_tokens=160,
        do_sample=False,
        streamer=trace,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, plain)
    (passes, drafts), (all_passes, all_drafts) = trace.at[31], trace.at[-1]
    width = 3 * K if tree else K
    modelled = all_passes - passes + (all_drafts - drafts) * (draft + 0.02 * width)
    assert modelled <= 1.15 * (160 - 32)
    assert out.speculation.paused_rounds >= 0.7 * 159 and all_drafts >= 4


@pytest.mark.parametrize("draft", [0.1, 0.5])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_second_half_of_a_text_is_drafted_again(draft, tree, fixed_costs):
    fixed_costs(draft, node=0.002)
    target = tiny_llama()
    ids = torch.tensor(targets.prompts((8,)))
    plain = target.generate(ids, max_new_tokens=300, do_sample=False)[0].tolist()
    # The drafter's idea of the text is wrong up to token 150 and right from there on.
    idea = [*plain[:8], *((t + 1) % 64 for t in plain[8:158]), *plain[158:]]
    drafter = ScriptedDrafter([idea], [oracle(K)], K, tree)
    drafter.config.policy = "auto"
    trace = Trace(target)
    out = target.generate(
        ids, assistant_model=trace.watch(drafter), max_new_tokens=300, do_sample=False, streamer=trace
    )
    assert out[0].tolist() == plain
    # Two rounds convince; after them a pass gives K + 1 tokens.
    wait = 2 * (draft + 0.002 * 24) / PaysOff.spend + 8
    assert trace.at[-1][0] - trace.at[149][0] <= wait + (150 - wait) / (K + 1) + 3


@pytest.mark.parametrize(("name", "static"), [("llama", False), ("llama", True), ("gemma3", False)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_measuring_leaves_no_trace(name, batch, tree, static):
    target, inputs = targets.target(name), prompts(batch)
    settings = dict(max_new_tokens=24, do_sample=False, cache_implementation="static" if static else None)
    plain = target.generate(**inputs, **settings)
    drafter = scripted(target, batch, [mixed(4), oracle(4), adversary], 4, tree)
    drafter.config.policy = "auto"
    seen = []
    for _ in range(2):
        out = target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **settings)
        assert torch.equal(out.sequences, plain)
        (measured,) = policies.costs._measured[target][drafter].values()
        assert measured.known and measured.plain > 0 and measured.draft > 0
        seen.append((dict(measured.passes), measured.draft))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("family", ["assistant", "block", "chain", "tree"])
def test_same_seed_same_output(family):
    """Also when the costs were not known in the first call and are in the second."""
    target, inputs = tiny_llama(), prompts(3)
    if family == "assistant":
        drafter = AssistantDrafter.from_model(tiny_llama(seed=4), policy="auto")
    elif family == "block":
        drafter = pausable("block", target)
    else:
        drafter = scripted(target, 3, [mixed(4)], 4, family == "tree")
    drafter.config.policy = "auto"
    outs = []
    for seed in (5, 5, 6, 5):
        torch.manual_seed(seed)
        outs.append(
            target.generate(
                **inputs,
                assistant_model=drafter,
                do_sample=True,
                temperature=1.5,
                max_new_tokens=40,
                return_dict_in_generate=True,
            )
        )
    assert torch.equal(outs[0].sequences, outs[1].sequences) and torch.equal(outs[0].sequences, outs[3].sequences)
    assert outs[0].speculation.rounds == outs[1].speculation.rounds == outs[3].speculation.rounds
    assert not torch.equal(outs[0].sequences, outs[2].sequences)


@pytest.mark.parametrize("node", [0.1, 0.3])
@pytest.mark.parametrize("family", ["assistant", "block"])
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_that_were_cut_before_the_pass(family, node, batch, monkeypatch):
    """The target may choose by itself the very token that was cut; the session must not take it for verified."""
    monkeypatch.setattr(decoding, "costs_of", lambda *args: costs(0.0, node))
    monkeypatch.setattr(PaysOff, "warm_up", 0)
    target, inputs = tiny_llama(), prompts(batch)
    plain = target.generate(**inputs, max_new_tokens=60, do_sample=False)
    drafter = pausable(family, target)
    drafter.config.policy = "auto"
    out = target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=60,
        do_sample=False,
        assistant_confidence_threshold=0.01,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, plain)
    gained = out.speculation
    assert gained.verified < gained.drafted
    # Weights almost the target's own: drafts are often right, unless positions or caches slipped.
    assert family == "block" or node > 0.1 or gained.acceptance > 0.3


# pause and resume -----------------------------------------------------------------------------------------------------


class Pausing(FixedLength):
    """Drafts nothing from the 24th to the 88th token of a call."""

    first, last = 24, 88

    def __init__(self, *args):
        super().__init__(*args)
        self.done = 1

    def before(self, rows, outlook=None):
        return [0] * len(rows) if self.first <= self.done < self.last else super().before(rows)

    def observe(self, rows, offered, committed):
        super().observe(rows, offered, committed)
        self.done += max(map(len, committed))


def pausable(family: str, target):
    if family == "scripted":
        return scripted_long(target)
    if family == "ngram":
        return NgramDrafter(NgramConfig.tiny(policy="fixed"))
    torch.manual_seed(3)
    if family == "block":
        return BlockDrafter(BlockConfig.tiny(initializer_range=0.2, policy="fixed")).eval()
    noisy = tiny_llama()
    with torch.no_grad():
        for weights in noisy.parameters():
            weights += 0.03 * torch.randn_like(weights)
    return AssistantDrafter.from_model(noisy, policy="fixed")


def scripted_long(target):
    ids = torch.tensor(targets.prompts((8,)))
    answer = target.generate(ids, max_new_tokens=200, do_sample=False)[0].tolist()
    return ScriptedDrafter([answer], [mixed(4)], 4)


def drafted(target, drafter, ids) -> tuple[torch.Tensor, dict[int, tuple[int, list[int]]]]:
    """The output, and per position of an anchor the accepted length and the draft."""
    seen, start = {}, type(drafter).start

    def watching(view, batch):
        session = start(drafter, view, batch)
        propose, observe, last = session.propose, session.observe, []

        def noting(context):
            draft = propose(context)
            last[:] = [(context.position[0], draft.tokens[0][draft.valid[0]].tolist())]
            return draft

        def counting(commit):
            if last:
                position, draft = last.pop()
                seen[position] = len(commit.tokens[0]) - 1, draft
            observe(commit)

        session.propose, session.observe = noting, counting
        return session

    drafter.start = watching
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=180, do_sample=False)
    del drafter.start
    return out, seen


@pytest.mark.parametrize("family", ["scripted", "ngram", "assistant", "block"])
def test_paused_drafter_goes_on_as_if_it_never_had(family, monkeypatch):
    target = tiny_llama()
    ids = torch.tensor(targets.prompts((8,)))
    plain = target.generate(ids, max_new_tokens=180, do_sample=False)
    out, always = drafted(target, pausable(family, target), ids)
    assert torch.equal(out, plain)
    monkeypatch.setattr(decoding, "FixedLength", Pausing)
    out, paused = drafted(target, pausable(family, target), ids)
    assert torch.equal(out, plain)
    begin = 8 + Pausing.last - 2
    assert not any(8 + Pausing.first + K < at < begin for at in paused)
    late = [{at: found for at, found in run.items() if begin <= at} for run in (always, paused)]
    rates = [sum(n for n, _ in run.values()) / max(1, sum(len(d) for _, d in run.values())) for run in late]
    assert rates[1] == pytest.approx(rates[0], rel=0.05)
    if family != "scripted":  # whose drafts count rounds, not text
        # A draft depends on the text alone: wherever both runs drafted, they drafted the same.
        common = late[0].keys() & late[1].keys()
        assert len(common) >= 10
        assert all(late[0][at][1] == late[1][at][1] for at in common)
    assert family not in ("scripted", "assistant") or rates[0] > 0.1


# real time ------------------------------------------------------------------------------------------------------------


class Sleepy(ScriptedDrafter):
    """A wrong draft that takes a while."""

    seconds = 0.0

    def start(self, view, batch):
        session = super().start(view, batch)
        propose = session.propose

        def sleeping(context):
            time.sleep(self.seconds)
            return propose(context)

        session.propose = sleeping
        return session


class Stopwatch(BaseStreamer):
    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass

    @property
    def late(self) -> float:
        """Seconds from the 32nd new token to the last (the first entry is the prompt's)."""
        return self.times[-1] - self.times[32]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_adversary_costs_little_real_time(share):
    """The best of up to three interleaved ratios, costs measured anew: other work on the machine only ever adds."""
    # Wide and deep enough that a pass outweighs the interpreter's share of a round.
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=64,
        pad_token_id=0,
    )
    target = LlamaForCausalLM(config).eval()
    target.generation_config.eos_token_id = None
    ids = torch.tensor(targets.prompts((8,)))
    settings = dict(max_new_tokens=200, do_sample=False)
    answer = target.generate(ids, **settings)[0].tolist()
    drafter = Sleepy([answer], [adversary], K)
    drafter.config.policy = "auto"
    ratios = []
    for _ in range(3):
        policies.costs._measured.pop(target, None)
        plain, mine = Stopwatch(), Stopwatch()
        target.generate(ids, streamer=plain, **settings)
        drafter.seconds = share * plain.late / (200 - 32)
        target.generate(ids, assistant_model=drafter, streamer=mine, **settings)
        ratios.append(mine.late / plain.late)
        if ratios[-1] <= 1.15:
            return
    raise AssertionError(ratios)


def test_drawn_drafts_are_budgeted_without_the_clock(monkeypatch):
    """A sampled text made of drawn drafts depends on their depths, so no measured second may choose them."""
    target, inputs = tiny_llama(), prompts(2)
    drafter = AssistantDrafter.from_model(tiny_llama(seed=4))
    monkeypatch.setattr(decoding, "costs_of", lambda *args: pytest.fail("measured costs were asked for"))
    torch.manual_seed(3)
    first = target.generate(**inputs, assistant_model=drafter, do_sample=True, max_new_tokens=30)
    torch.manual_seed(3)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, do_sample=True, max_new_tokens=30), first)
