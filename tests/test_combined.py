"""Two drafters as one: the text stays plain's, the network rests where copies do, and both are judged by what came."""

from __future__ import annotations

import copy
import json

import pytest
import test_sampling_law
import torch
from conftest import mixed
from scripted import free_answers, new_tokens, prompts, scripted
from targets import NEW_TOKENS, plain, target
from test_sampling_law import PROMPT, TOKENS, V, draw, exact_law, p_value
from test_sampling_law import target as law_target
from transformers import AutoModel

from hf_specdraft import AutoDrafter, decoding
from hf_specdraft.draft import Commit, Context, Draft, Features
from hf_specdraft.drafters.assistant import AssistantConfig, AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.combined import CombinedConfig, CombinedDrafter
from hf_specdraft.drafters.combined.session_combined import Source
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter
from hf_specdraft.evaluation import load_drafter
from hf_specdraft.policies import Costs, FixedLength, PaysOff

ANSWERS = plain("llama")


def ngram(**fields) -> NgramDrafter:
    return NgramDrafter(NgramConfig.tiny(recent=0, **fields))


def block(**fields) -> BlockDrafter:
    torch.manual_seed(1)
    return BlockDrafter(BlockConfig.tiny(**fields)).eval()


def combined(network, mode="first", nodes=6, corpus=(), **fields) -> CombinedDrafter:
    """corpus: texts that the n-gram part knows, say the answers."""
    retriever = ngram(tree_nodes=nodes)
    retriever.set_corpus(corpus)
    return CombinedDrafter.from_drafters(
        retriever, network, **{"mode": mode, "tree_nodes": nodes, "policy": "fixed", **fields}
    )


class Counted:
    """Counts the network's drafts and remembers them."""

    def __init__(self, drafter: CombinedDrafter, monkeypatch):
        self.drafts: list[Draft] = []
        start = drafter.network.start

        def listening(view, batch):
            session = start(view, batch)
            propose = session.propose
            session.propose = lambda context: self.drafts.append(propose(context)) or self.drafts[-1]
            return session

        monkeypatch.setattr(drafter.network, "start", listening)


def generate(model, drafter, rows=1, **kwargs):
    inputs = prompts(rows)
    out = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=drafter,
        return_dict_in_generate=True,
        **kwargs,
    )
    return new_tokens(out.sequences, inputs), out.speculation


def truth(model, rows: int) -> list[list[int]]:
    inputs = prompts(rows)
    return new_tokens(model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False), inputs)


# ---- the text ----


@pytest.mark.parametrize("nodes", [0, 6], ids=["chain", "tree"])
@pytest.mark.parametrize("mode", ["first", "tree"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("part", ["copy", "scripted", "noise"])
def test_the_text_is_plains(part, rows, mode, nodes):
    model = target("llama")
    if part == "copy":
        network = AssistantDrafter.from_model(copy.deepcopy(model))
    elif part == "scripted":
        network = scripted(model, rows, [mixed(3), lambda r: 4, lambda r: 0], tree=nodes > 0)
    else:
        network = block(tree_nodes=nodes)
    drafter = combined(network, mode, nodes, corpus=[truth(model, 1)[0][5:]])
    text, stats = generate(model, drafter, rows)
    assert text == truth(model, rows)
    assert stats.accepted > 0


@pytest.mark.parametrize("mode", ["first", "tree"])
def test_the_law_of_sampled_texts(mode, monkeypatch):
    """An assistant would draw from its own law; combined, it takes its argmax."""
    monkeypatch.setattr(test_sampling_law, "ROWS", 6000)
    torch.manual_seed(5)
    config = AssistantConfig.tiny(vocab_size=V, num_assistant_tokens=3, draft_sampling=True)
    drafter = combined(AssistantDrafter(config).eval(), mode, corpus=[[*PROMPT, 1, 2, 0]])
    out = draw(drafter, "temperature")
    assert out.speculation.accepted > 0
    assert p_value(out.sequences[:, len(PROMPT) :][:, :TOKENS], exact_law("temperature")) > 1e-4


# ---- first: the network rests where the text is copied ----


def test_the_network_is_not_run_while_copies_promise_more(monkeypatch):
    model = target("llama")
    drafter = combined(block(), corpus=free_answers(model, 1) * 3)
    counted = Counted(drafter, monkeypatch)
    text, stats = generate(model, drafter)
    assert text == truth(model, 1) and counted.drafts == []
    assert stats.acceptance > 0.5 and stats.rounds[0] < NEW_TOKENS / 2

    drafter = combined(block(), corpus=[])
    counted = Counted(drafter, monkeypatch)
    _, stats = generate(model, drafter)
    assert len(counted.drafts) >= stats.rounds[0] / 2


def test_each_row_is_served_by_the_part_that_promises_more(monkeypatch):
    """Row 0 is in the corpus, the others are not: they get the network's draft, row 0 keeps its copy."""
    session = combined(block(tree_nodes=0), nodes=0, corpus=[[7, 8, 9, 10, 11, 12]] * 2).start(view(), 2)
    session.observe(Commit([[7, 8, 9], [20, 21, 22]], features([2, 2], [0, 0])))
    made = []
    propose = session.network.session.propose
    session.network.session.propose = lambda context: made.append((context.lengths, propose(context))) or made[-1][1]
    draft = session.propose(context([9, 22], [2, 2], [3, 3]))
    (lengths, network), *_ = made
    assert lengths == [0, 3]
    assert draft.tokens[0].tolist() == [10, 11, 12]
    assert draft.tokens[1].tolist() == network.tokens[1].tolist()
    assert not draft.free and draft.law is None


def test_rounds_without_the_network_leave_its_state_right():
    """Skipped for some rounds, it then drafts exactly as one that was asked in every round."""
    answer = ANSWERS[0]
    for network in (block(), eagle(), AssistantDrafter(AssistantConfig.tiny()).eval()):
        rested, asked = (combined(network, nodes=0).start(view(), 1) for _ in range(2))
        for session in (rested, asked):
            session.observe(Commit([answer[:6]], features([5], [0])))
        for at in range(6, 20, 3):
            here = context([answer[at - 1]], [at - 1], [3])
            asked.network.propose(here, [True])
            rested.propose(copy.copy(here).__class__(**{**vars(here), "free_only": True}))
            for session in (rested, asked):
                session.observe(Commit([answer[at : at + 3]], features([3], [at - 1])))
        here = context([answer[20]], [20], [3])
        one, other = (session.network.session.propose(here) for session in (rested, asked))
        assert one.shape[1] > 0
        torch.testing.assert_close(one.tokens, other.tokens)
        if one.confidence is not None:
            torch.testing.assert_close(one.confidence, other.confidence)


# ---- tree: both at once ----


def test_a_tree_holds_both_parts_and_at_most_its_nodes():
    drafter = combined(block(tree_nodes=6), "tree", nodes=6, corpus=[[7, 8, 9, 10, 11, 12]] * 2)
    session = drafter.start(view(), 1)
    session.observe(Commit([[7, 8, 9]], features([2], [0])))
    here = context([9], [2], [3], nodes=32, tree=True)
    both = session.propose(here)
    parts = [source.waiting[0] for source in (session.ngram, session.network)]
    paths = [set(paths_of(tokens, parents)) for parents, tokens, _ in parts]
    assert paths[0] - paths[1] and paths[1] - paths[0]
    assert set(paths_of(both.tokens[0].tolist(), both.parents[0].tolist())) == paths[0] | paths[1]
    rating = dict(zip(paths_of(both.tokens[0].tolist(), both.parents[0].tolist()), both.confidence[0].tolist()))
    assert all(rating[path] <= rating[path[:-1]] for path in rating if len(path) > 1)

    session.observe(Commit([[]]))
    small = session.propose(context([9], [2], [3], nodes=4, tree=True))
    kept = set(paths_of(small.tokens[0].tolist(), small.parents[0].tolist()))
    assert len(kept) == 4
    assert min(rating[path] for path in kept) >= max(rating[path] for path in set(rating) - kept) - 1e-6


def test_a_token_of_both_parts_rates_above_either():
    session = combined(block(), "tree").start(view(), 1)
    for source, chance in ((session.ngram, 0.5), (session.network, 0.4)):
        source.session.propose = lambda c, chance=chance: Draft.chain(
            torch.tensor([[5, 6]]), [2], confidence=torch.tensor([[chance, chance / 2]])
        )
    draft = session.propose(context([9], [2], [3], nodes=6, tree=True))
    torch.testing.assert_close(draft.confidence, torch.tensor([[0.7, 1 - 0.75 * 0.8]]))


# ---- ratings ----


def test_trust_is_what_came_of_what_was_claimed():
    """A part that claims 0.9 a step and is right half the time ends at about 0.5 a step, cut drafts or not."""

    class Claims:
        def propose(self, context):
            return Draft.chain(torch.tensor([[1, 1, 1]]), [3], confidence=torch.tensor([[0.9, 0.81, 0.729]]))

        def observe(self, commit):
            pass

    generator = torch.Generator().manual_seed(0)
    for verified in (3, 1, 0):
        source = Source(Claims(), NgramConfig.tiny())
        source.memory = 0.999
        for _ in range(600):
            draft = source.propose(context([0], [0], [3]), [True])
            right = int((torch.rand(verified, generator=generator) < 0.5).long().cumprod(0).sum())
            last = int(torch.rand((), generator=generator) < 0.5) if right == verified else 0
            source.observe(Commit([[1] * right + [last]]))
        assert draft.confidence[0, 0].item() == pytest.approx(0.5, abs=0.06)
        assert draft.confidence[0, 2].item() == pytest.approx(0.125, abs=0.05)
        assert source.offer == pytest.approx(0.875, abs=0.15)


def test_a_part_without_ratings_is_rated_by_what_came():
    class Silent:
        def propose(self, context):
            return Draft.chain(torch.tensor([[1, 1]]), [2])

        def observe(self, commit):
            pass

    source = Source(Silent(), NgramConfig.tiny())
    for _ in range(200):
        draft = source.propose(context([0], [0], [2]), [True])
        source.observe(Commit([[1, 1, 5]]))
    assert draft.confidence.tolist()[0] == pytest.approx([1.0, 1.0], abs=0.1)


def test_an_assistant_keeps_its_own_threshold():
    for threshold, length in ((0.0, 4), (0.99, 1)):
        network = AssistantDrafter(AssistantConfig.tiny(confidence_threshold=threshold)).eval()
        part = Source(network.start(view(), 1), network.config)
        part.session.observe(Commit([[5, 9, 2]]))
        assert int(part.propose(context([2], [2], [4]), [True]).valid.sum()) == length


def test_a_poor_network_is_tried_again():
    source = Source(None, NgramConfig.tiny())
    source.drafts = 20.0
    assert source.offer < 0.1
    source.session = type("Deaf", (), {"observe": lambda self, commit: None})()
    for _ in range(200):
        source.observe(Commit([[]]))
    assert source.offer > 0.9


# ---- the policy ----


def test_a_network_that_does_not_pay_rests_and_the_copies_go_on(monkeypatch):
    """Its draft costs five passes and is never right; the corpus has the answer's second half."""
    model = target("llama")
    known = truth(model, 1)[0]
    drafter = combined(scripted(model, 1, [lambda r: 0]), "tree", 6, [known[14:]] * 3, policy="auto")
    monkeypatch.setattr(decoding, "costs_of", lambda *_: Costs({0: 1.0, 6: 1.12}, 5.0))
    counted = Counted(drafter, monkeypatch)
    text, stats = generate(model, drafter)
    assert text == [known]
    assert len(counted.drafts) == PaysOff.warm_up + 1  # the first judgement is on the one after
    assert stats.accepted >= 5


def test_rounds_without_the_network_say_nothing_of_its_gain():
    def policy():
        return PaysOff(FixedLength(4), Costs({0: 1.0, 4: 1.1}, 0.5), nodes=6, free_part=True)

    def a_round(policy, free, accepted):
        policy.before([0])
        draft = Draft.chain(torch.ones(1, 4, dtype=torch.long), [4], confidence=torch.full((1, 4), 0.9))
        draft.free = free or policy.free_only
        policy.cut(draft, [True])
        policy.observe([0], [4], [[1] * (accepted + 1)])

    good, poor = policy(), policy()
    for _ in range(20):
        a_round(good, True, 0)  # the copies' failures
        a_round(poor, True, 4)
    assert good.rounds == poor.rounds == 0
    for _ in range(6):
        a_round(good, False, 4)
        a_round(poor, False, 0)
    assert good.before([0]) == [4] and not good.free_only
    assert poor.before([0]) == [4] and poor.free_only


@pytest.mark.parametrize("mode", ["first", "tree"])
def test_under_the_policy_the_text_is_plains(mode):
    model = target("llama")
    for rows in (1, 3):
        drafter = combined(AssistantDrafter.from_model(copy.deepcopy(model)), mode, policy="auto")
        for _ in range(2):  # the second call knows the costs
            assert generate(model, drafter, rows)[0] == truth(model, rows)


# ---- saving ----


@pytest.mark.parametrize("network", ["block", "assistant"])
def test_one_folder_holds_both(tmp_path, network):
    made = block() if network == "block" else AssistantDrafter(AssistantConfig.tiny()).eval()
    drafter = combined(made, "tree", corpus=[[1, 2, 3]])
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["network_config"]["model_type"] == made.config.model_type
    for loaded in (AutoDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is CombinedDrafter and not loaded.training
        assert loaded.feature_layers == made.feature_layers and loaded.config.mode == "tree"
        assert loaded.ngram.corpus.tolist() == drafter.ngram.corpus.tolist()
        state = loaded.network.state_dict()
        assert state.keys() == made.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in made.state_dict().items())
        model = target("llama")
        (text, stats), (expected, before) = generate(model, loaded), generate(model, drafter)
        assert text == expected and stats.offered_by_depth == before.offered_by_depth


def test_the_command_line_combines_with_a_folder(tmp_path):
    block().save_pretrained(tmp_path)
    drafter = load_drafter(f"ngram+{tmp_path}:mode=tree,tree_nodes=7")
    assert type(drafter.network) is BlockDrafter and drafter.config.mode == "tree" and drafter.config.tree_nodes == 7
    with pytest.raises(ValueError, match="has no field modes"):
        load_drafter(f"ngram+{tmp_path}:modes=tree")


def test_refusals():
    with pytest.raises(ValueError, match="mode must be"):
        combined(block(), "last")
    with pytest.raises(ValueError, match="must be a drafter with a network"):
        combined(ngram())
    with pytest.raises(ValueError, match="from_drafters"):
        CombinedDrafter(CombinedConfig())
    with pytest.raises(ValueError, match="the target's vocabulary is 6"):
        combined(block()).check(decoding.TargetView(law_target()))


# ---- helpers ----


def eagle() -> Eagle3Drafter:
    torch.manual_seed(1)
    return Eagle3Drafter(Eagle3Config.tiny()).eval()


def view() -> decoding.TargetView:
    return decoding.TargetView(target("llama"))


def features(counts: list[int], start: list[int]) -> Features:
    """Two layers of width 32; what a position has depends on the position alone."""
    hidden = torch.stack(
        [torch.sin(torch.arange(s, s + max(counts))[:, None] * torch.linspace(0.1, 2, 64)) for s in start]
    )
    return Features(hidden, list(counts), list(start))


def context(anchor: list[int], position: list[int], lengths: list[int], nodes: int | None = None, tree=False):
    return Context(torch.tensor(anchor), position, lengths, max(lengths) if nodes is None else nodes, tree)


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents):
        if parent != -2:
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
