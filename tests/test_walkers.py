"""Trees and searches over a corrector's scores."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace

import pytest
import test_sampling_law
import torch
from targets import LENGTHS, plain, target
from test_lossless import assert_equals_plain
from test_sampling_law import BLOCK, assert_fits, assert_misfits
from test_sampling_law import V as LAW_VOCAB
from torch import Tensor

from hf_specdraft import trees, walkers
from hf_specdraft.correctors import Corrector, Scores
from hf_specdraft.correctors.base import State
from hf_specdraft.draft import Block, Commit, Context, Draft, Features, Law
from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.policies import Costs, FixedLength, PaysOff
from hf_specdraft.verification import match

# All that a walker asks of a drafter with the target's vocabulary.
WHOLE = SimpleNamespace(
    target_ids=lambda index: index, draft_ids=None, confidence=None, config=SimpleNamespace(draft_sampling=False)
)


class Hashed(Corrector):
    """Every token of the path changes the next one's scores: a state that leaked from one walker to another shows.

    support: score the `support` best marginals of a slot only, under their ids.
    """

    def __init__(self, vocab: int, strength: float = 2.0, support: int | None = None, seed: int = 0):
        super().__init__(None)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("table", strength * torch.randn(11, vocab, generator=generator))
        self.support, self.steps, self.walkers = support, 0, 0

    def begin(self, drafter, view, block):
        self.steps = self.walkers = 0
        state = super().begin(drafter, view, block)
        return State(drafter, view, block, state.rows, {"seen": torch.zeros_like(state.rows)})

    def step(self, state, slot, previous):
        self.steps, self.walkers = self.steps + 1, self.walkers + len(previous)
        seen = (3 * state.carry["seen"] + previous + 1) % len(self.table)
        logits, ids = state.block.logits[state.rows, slot], None
        logits = logits + self.table[seen][:, : logits.shape[-1]]
        if self.support is not None:
            index = state.block.logits[state.rows, slot].topk(self.support).indices
            logits, ids = logits.gather(1, index), state.drafter.target_ids(index)
        return Scores(logits, ids), State(state.drafter, state.view, state.block, state.rows, {"seen": seen})


class Neutral(Corrector):
    def step(self, state, slot, previous):
        return Scores(state.block.logits[state.rows, slot]), state


def make_block(batch=3, slots=3, vocab=4, scale=1.0, seed=0) -> Block:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(batch, slots, vocab, generator=generator)
    return Block(logits, None, torch.zeros(batch, slots, 1), torch.arange(batch) % vocab)


def asked(nodes, lengths, anchor=None) -> Context:
    return Context(anchor, [5] * len(lengths), lengths, nodes, tree=True)


def grow(corrector, block, nodes, lengths=None, drafter=WHOLE) -> Draft:
    lengths = lengths or [block.logits.shape[1]] * len(block.anchor)
    return walkers.tree(drafter, None, corrector, block, asked(nodes, lengths), lengths)


def words(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The prefixes that the nodes of a row stand for, in their order."""
    found = []
    for token, parent, real in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), draft.valid[row].tolist()):
        if real:
            found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def conditional(corrector, block, row, prefix, drafter=WHOLE, view=None) -> dict[int, float]:
    """Log-probabilities of what follows a prefix, by a walk of its own."""
    state, previous = corrector.begin(drafter, view, block).fork(torch.tensor([row])), block.anchor[[row]]
    for slot, token in enumerate((*prefix, None)):
        scores, state = corrector.step(state, slot, previous)
        previous = torch.tensor([token if token is not None else 0])
    ids = drafter.target_ids(torch.arange(scores.logits.shape[1])) if scores.ids is None else scores.ids[0]
    return dict(zip(ids.tolist(), scores.logits[0].log_softmax(-1).tolist()))


def every_prefix(corrector, block, row, depth, drafter=WHOLE, view=None) -> dict[tuple[int, ...], float]:
    level, found = {(): 0.0}, {}
    for _ in range(depth):
        level = {
            (*prefix, token): score + more
            for prefix, score in level.items()
            for token, more in conditional(corrector, block, row, prefix, drafter, view).items()
        }
        found |= level
    return found


# ---- trees: which nodes ----


@cache
def all_prefixes(seed):
    corrector, block = Hashed(4, seed=seed), make_block(seed=seed)
    return [every_prefix(corrector, block, row, depth) for row, depth in enumerate((3, 1, 2))]


@pytest.mark.parametrize("seed", range(3))
def test_the_likeliest_prefixes_of_the_corrected_law(seed):
    """Rows of unequal lengths together, every budget up to all there is."""
    corrector, block = Hashed(4, seed=seed), make_block(seed=seed)
    for nodes in range(1, 86):
        draft = grow(corrector, block, nodes, [3, 1, 2])
        for row, prefixes in enumerate(all_prefixes(seed)):
            ranked = sorted(prefixes, key=prefixes.get, reverse=True)[:nodes]
            assert words(draft, row) == ranked
            want = [math.exp(prefixes[word]) for word in ranked]
            assert draft.confidence[row, : len(want)].tolist() == pytest.approx(want, abs=1e-6)
        assert draft.law is None and draft.confidence_kind == "own" and draft.evidence is block


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0], ids=["flat", "mid", "peaked"])
def test_a_wide_vocabulary_whose_best_nodes_do_not_fit_one_step(scale):
    corrector, block = Hashed(24, scale), make_block(batch=1, slots=3, vocab=24, scale=0.5 + scale)
    draft, prefixes = grow(corrector, block, 120), every_prefix(corrector, block, 0, 3)
    assert words(draft, 0) == sorted(prefixes, key=prefixes.get, reverse=True)[:120]


@pytest.mark.parametrize("support", [None, 3])
def test_a_drafter_of_fewer_tokens_and_scores_of_fewer_still(support):
    ids = torch.tensor([2, 5, 7, 8, 11])
    drafter = SimpleNamespace(target_ids=lambda index: ids[index])
    corrector, block = Hashed(5, support=support), make_block(vocab=5)
    draft = grow(corrector, block, 20, drafter=drafter)
    for row in range(3):
        prefixes = every_prefix(corrector, block, row, 3, drafter)
        assert words(draft, row) == sorted(prefixes, key=prefixes.get, reverse=True)[:20]


@pytest.mark.parametrize("nodes", [1, 7, 30])
def test_without_a_correction_it_is_the_tree_of_the_marginals(nodes):
    block, lengths = make_block(batch=4, slots=6, vocab=50, scale=3.0), [6, 0, 3, 6]
    draft = grow(Neutral(None), block, nodes, lengths)
    tokens, parents, valid, scores = trees.from_marginals(block.logits.log_softmax(-1), nodes, lengths)
    assert torch.equal(draft.tokens, tokens) and torch.equal(draft.parents, parents)
    assert torch.equal(draft.valid, valid) and torch.equal(draft.confidence, scores.exp().float())


def test_a_certain_law_gives_the_greedy_chain():
    corrector, block = Hashed(6, strength=100.0), make_block(slots=5, vocab=6)
    draft = grow(corrector, block, 5)
    chain = walkers.chain(WHOLE, None, corrector, block, asked(5, [5] * 3), [5] * 3)
    assert trees.is_chain(draft.parents, draft.valid) and draft.valid.all()
    assert torch.equal(draft.tokens, chain.tokens)


def test_impossible_tokens_and_a_network_that_says_nan_are_left_out():
    block = make_block(vocab=5)
    block.logits[:, :, 2:] = -math.inf
    block.logits[1, 1] = math.nan
    block.logits[2] = -math.inf
    draft = grow(Hashed(5), block, 30)
    assert draft.valid.sum(1).tolist() == [2 + 4 + 8, 2, 0]
    assert set(draft.tokens[draft.valid].tolist()) == {0, 1}


def test_rows_that_ask_for_nothing_get_nothing():
    assert grow(Hashed(4), make_block(), 9, [0, 2, 0]).valid.sum(1).tolist() == [0, 9, 0]


def test_a_peaked_law_takes_one_step_per_slot():
    """What the chain takes; the nodes that are expanded are few more than those that stay."""
    corrector, block = Hashed(50, strength=3.0), make_block(batch=1, slots=8, vocab=50, scale=4.0)
    draft = grow(corrector, block, 10)
    assert draft.valid.sum() == 10 and corrector.steps <= 8 and corrector.walkers <= 40


CORRECTORS = {
    "markov": {"name": "markov", "rank": 4},
    "markov rnn": {"name": "markov", "rank": 4, "kind": "rnn"},
    "gru": {"name": "gru", "rank": 4, "hidden_size": 8},
    "selector": {"name": "selector", "rank": 4, "top_k": 5},
    "lilicorr": {"name": "lilicorr", "top_k": 4, "num_heads": 2, "num_layers": 1},
}


def trained(corrector: str, **fields) -> BlockDrafter:
    """A drafter whose corrector is far from the neutral point that it starts at."""
    torch.manual_seed(5)
    sizes = dict(policy="fixed", num_assistant_tokens=3, initializer_range=0.2)
    drafter = BlockDrafter(BlockConfig.tiny(**{**sizes, "corrector": CORRECTORS[corrector], **fields})).eval()
    for weights in drafter.corrector.parameters():
        torch.nn.init.normal_(weights, std=0.7)
    return drafter


@pytest.mark.parametrize("corrector", CORRECTORS)
def test_every_corrector_goes_its_own_ways(corrector):
    drafter, view = trained(corrector), TargetView(target("llama"))
    session = drafter.start(view, 2)
    features = Features(torch.randn(2, 6, 64), [6, 4], [0, 0])
    session.observe(Commit([[1] * 7, [1] * 5], features))
    block = session.block_pass(asked(20, [2, 2], anchor=torch.tensor([3, 9])), slice(1, 3))
    with torch.no_grad():
        draft = walkers.tree(drafter, view, drafter.corrector, block, asked(20, [2, 2]), [2, 2])
        for row in range(2):
            prefixes = every_prefix(drafter.corrector, block, row, 2, drafter, view)
            ranked = sorted(prefixes, key=prefixes.get, reverse=True)[:20]
            assert set(words(draft, row)) == set(ranked)
            want = [math.exp(prefixes[word]) for word in words(draft, row)]
            assert draft.confidence[row, : len(want)].tolist() == pytest.approx(want, abs=1e-5)
        marginal = trees.from_marginals(block.logits.log_softmax(-1), 20, [2, 2])[0]
    assert not torch.equal(drafter.target_ids(marginal), draft.tokens)


# ---- trees: what they are worth ----


def accepted(draft: Draft, texts: Tensor) -> float:
    """Mean accepted length of a one-row draft when the text is one of texts [R, S]."""
    chosen = torch.nn.functional.pad(texts, (0, 1))
    chosen = chosen[:, torch.cat([torch.zeros(1, dtype=torch.long), draft.depth[0]])]
    many = len(texts)
    nodes = (x.expand(many, -1) for x in (draft.tokens, draft.parents, draft.valid))
    return match(chosen, *nodes).length.double().mean().item()


@pytest.mark.parametrize("seed", range(3))
def test_expected_acceptance_is_the_sum_of_confidences_and_beats_marginal_trees_and_chains(seed):
    """Texts drawn from the corrected law (which is the target's here)."""
    slots, vocab, many = 4, 6, 20_000
    corrector, block = Hashed(vocab, strength=1.5, seed=seed), make_block(1, slots, vocab, seed=seed)
    state = corrector.begin(WHOLE, None, block).fork(torch.zeros(many, dtype=torch.long))
    texts = [block.anchor.expand(many)]
    for slot in range(slots):
        scores, state = corrector.step(state, slot, texts[-1])
        texts.append(torch.multinomial(scores.logits.softmax(-1), 1)[:, 0])
    texts = torch.stack(texts[1:], 1)
    # The marginals themselves, of the same law: the best that an uncorrected tree could be made of.
    laws = torch.stack([torch.bincount(column, minlength=vocab) / many for column in texts.T])
    tokens, parents, valid, _ = trees.from_marginals(laws.log()[None], 12, [slots])
    corrected = grow(corrector, block, 12)
    ours = accepted(corrected, texts)
    assert ours == pytest.approx(corrected.confidence.sum().item(), abs=0.03)
    assert ours > accepted(Draft(tokens, parents, valid), texts)
    chain = walkers.chain(WHOLE, None, corrector, block, asked(4, [slots]), [slots])
    assert accepted(grow(corrector, block, slots), texts) >= accepted(chain, texts)
    assert ours > accepted(chain, texts)


@pytest.mark.parametrize("node", [0.0, 0.1, 10.0])
def test_only_what_pays_is_verified(node):
    """PaysOff rates corrected trees like others (CaDDTree): costly nodes leave fewer of them, the likeliest."""
    policy = PaysOff(FixedLength(4, batch=2), Costs({0: 1.0, 20: 1.0 + 20 * node}, 0.1), nodes=20)
    policy.rounds = policy.warm_up
    draft = grow(Hashed(8), make_block(2, 4, 8), 20)
    cut = policy.cut(draft, [True, True])
    count = cut.shape[1]
    assert count == {0.0: 20, 10.0: 0}.get(node, count) and (0 < count < 20 or node in (0.0, 10.0))
    for row in range(2):
        assert words(cut, row) == words(draft, row)[:count]


# ---- beams ----


def search(corrector, block, width, lengths=None) -> Draft:
    lengths = lengths or [block.logits.shape[1]] * len(block.anchor)
    return walkers.beam(WHOLE, None, corrector, block, asked(0, lengths), lengths, width)


def test_one_path_is_the_greedy_chain():
    corrector, block = Hashed(9), make_block(4, 5, 9)
    chain = walkers.chain(WHOLE, None, corrector, block, asked(0, [5] * 4), [5] * 4)
    assert torch.equal(search(corrector, block, 1).tokens, chain.tokens)


@pytest.mark.parametrize("additive", [False, True])
def test_enough_paths_find_the_best_one(additive):
    """Rows of unequal lengths: each gets the best path of its own length."""
    lengths, differ = [3, 1, 0, 2], 0
    for seed in range(4):
        corrector, block = Hashed(4, 0.5, seed=seed), make_block(4, scale=0.5, seed=seed)
        corrector.additive = additive
        draft, greedy = search(corrector, block, 64, lengths), search(corrector, block, 1, lengths)
        assert draft.valid.sum(1).tolist() == lengths and draft.law is None and draft.confidence_kind == "own"
        for row, length in enumerate(lengths):
            prefixes = every_prefix(corrector, block, row, length)
            totals = {word: prefixes[word] for word in prefixes if len(word) == length}
            if additive:
                totals = {word: raw(corrector, block, row, word) for word in totals}
            best = max(totals, key=totals.get, default=())
            assert tuple(draft.tokens[row, :length].tolist()) == best
            want = [math.exp(prefixes[best[: n + 1]]) for n in range(length)]
            assert draft.confidence[row, :length].tolist() == pytest.approx(want, abs=1e-6)
            differ += tuple(greedy.tokens[row, :length].tolist()) != best
    assert differ  # a search that is the chain by another name finds less


def raw(corrector, block, row, word) -> float:
    state, previous, total = corrector.begin(WHOLE, None, block).fork(torch.tensor([row])), block.anchor[[row]], 0.0
    for slot, token in enumerate(word):
        scores, state = corrector.step(state, slot, previous)
        total, previous = total + scores.logits[0, token].item(), torch.tensor([token])
    return total


def test_a_path_ends_where_nothing_is_possible():
    block = make_block(3, 4, 5)
    block.logits[0, 2] = -math.inf
    block.logits[1, 0] = math.nan
    assert search(Hashed(5), block, 3).valid.sum(1).tolist() == [2, 0, 4]


# ---- through generate ----


FORMS = {"tree": dict(tree_nodes=7), "beam": {}}


def corrected_drafter(form, **fields) -> BlockDrafter:
    torch.manual_seed(5)
    config = BlockConfig.tiny(policy="fixed", num_assistant_tokens=3, **FORMS[form], **fields)
    drafter = BlockDrafter(config).eval()
    drafter.corrector = Hashed(64)
    drafter.corrector.beam = 3 if form == "beam" else 0
    return drafter


@pytest.mark.parametrize("lengths", [LENGTHS[2:3], LENGTHS], ids=["batch1", "batch4"])
@pytest.mark.parametrize("name", ["llama", "qwen2_sliding"])
@pytest.mark.parametrize("form", FORMS)
def test_greedy_output_is_plains(form, name, lengths):
    stats = assert_equals_plain(target(name), plain(name, None, lengths), corrected_drafter(form))
    assert stats.verified > 0


@pytest.mark.parametrize("corrector", ["markov rnn", "selector"])
def test_greedy_output_with_trained_correctors_is_plains(corrector):
    stats = assert_equals_plain(target("llama"), plain("llama"), trained(corrector, tree_nodes=7))
    assert stats.verified > 0


def law_drafter(form):
    return corrected_drafter(form, vocab_size=LAW_VOCAB, **BLOCK)


@pytest.fixture
def fewer_rows(monkeypatch):
    monkeypatch.setattr(test_sampling_law, "ROWS", 4000)


@pytest.mark.parametrize("form", FORMS)
def test_sampled_output_has_the_targets_law(form, fewer_rows):
    """Nothing was drawn, whatever `draft_sampling` says: the rule for point drafts."""
    assert law_drafter(form).config.draft_sampling
    assert_fits(law_drafter(form), "all_warpers")


def test_a_search_result_that_claims_to_be_drawn_is_noticed(monkeypatch, fewer_rows):
    """The corrector's law at each slot of the best path is not what the path was drawn from."""
    found = walkers.beam

    def claims(drafter, view, corrector, block, context, lengths, width):
        draft = found(drafter, view, corrector, block, context, lengths, width)
        state, previous, laws = corrector.begin(drafter, view, block), block.anchor, []
        for slot in range(draft.shape[1]):
            scores, state = corrector.step(state, slot, previous)
            laws.append(walkers.warped(drafter, view, scores, context).softmax(-1))
            previous = draft.tokens[:, slot]
        probs = torch.stack(laws, 1)
        draft.law = Law(probs, drafter.draft_ids.expand_as(probs), torch.ones(len(lengths), dtype=torch.bool))
        return draft

    monkeypatch.setattr(walkers, "beam", claims)
    assert_misfits(law_drafter("beam"), "temperature")
