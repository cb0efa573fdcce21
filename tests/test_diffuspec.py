"""DiffuSpec's causal path search and its adaptive draft length."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import test_sampling_law
import torch
from targets import LENGTHS, TARGETS, plain, target
from test_lossless import assert_equals_plain
from test_sampling_law import BLOCK, assert_fits

from hf_specdraft import correctors, policies, walkers
from hf_specdraft.correctors.path import PathSearch, Text, Trigrams
from hf_specdraft.draft import Block, Commit, Context, Draft
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.policies import FixedLength, Situation
from hf_specdraft.policies.adl import AdaptiveDraftLength

END = 4
VIEW = SimpleNamespace(vocab_size=6, end_ids=(END,))
WHOLE = SimpleNamespace(target_ids=lambda index: index)


def block_of(probs, text=(1, 2)) -> Block:
    """One row's block with these probabilities [S, V]."""
    memory = Text(1)
    memory.hear([list(text)])
    logits = torch.tensor([probs]).log()
    return Block(logits, None, torch.zeros(1, len(probs), 1), torch.tensor([text[-1]]), memory)


def columns(search: PathSearch, block: Block, drafter=WHOLE) -> list[list[int]]:
    """The candidates of each slot."""
    state = search.begin(drafter, VIEW, block)
    possible = (state.log_probs[0] > -math.inf).tolist()
    return [[token for token, here in zip(*column) if here] for column in zip(state.columns[0], possible)]


def found(search: PathSearch, block: Block) -> list[int]:
    slots = block.logits.shape[1]
    context = Context(block.anchor, [5], [slots], slots)
    draft = walkers.beam(WHOLE, VIEW, search, block, context, [slots], search.beam)
    return draft.tokens[0, : int(draft.valid.sum())].tolist()


# ---- candidates ----


@pytest.mark.parametrize(
    ("probs", "want"),
    [
        ([0.5, 0.3, 0.15, 0.05, 0.0, 0.0], [0, 1]),
        ([0.05, 0.5, 0.3, 0.15, 0.0, 0.0], [1, 2]),
        ([0.81, 0.1, 0.05, 0.04, 0.0, 0.0], [0]),
        ([0.5, 0.2, 0.0, 0.0, 0.3, 0.0], [0]),  # the end token counts, but stands last
    ],
)
def test_a_column_holds_tau_of_the_mass_and_the_end_token(probs, want):
    probs = [p + 1e-9 for p in probs]
    assert columns(PathSearch(None), block_of([probs])) == [[*want, END]]


def test_a_column_is_never_wider_than_asked():
    even = [0.21, 0.2, 0.19, 0.18, 0.02, 0.2]
    assert columns(PathSearch(None, tau=1.0, max_candidates=1), block_of([even])) == [[0, END]]


def test_columns_stop_behind_the_first_that_an_end_token_leads():
    """Not behind the first that contains it: they all do."""
    text, end = [0.5, 0.3, 0.1, 0.05, 0.04, 0.01], [0.1, 0.1, 0.0001, 0.1, 0.6, 0.0999]
    block = block_of([text, text, text, end, text, end, text])
    assert list(map(len, columns(PathSearch(None), block))) == [3, 3, 3, 3, 0, 0, 0]
    assert found(PathSearch(None, lambda_=1.0), block) == [0, 0, 0, END]


def test_ordinary_text_has_many_columns():
    """30 masks over which the end token is never the likeliest."""
    logits = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    logits[:, END] = -math.inf
    logits[:, END] = logits.amax(-1) - 0.1
    widths = list(map(len, columns(PathSearch(None), block_of(logits.softmax(-1).tolist()))))
    assert min(widths) >= 2 and len(widths) == 30


def test_a_reduced_vocabulary_without_the_end_token():
    ids = torch.tensor([1, 3, 5])
    drafter = SimpleNamespace(target_ids=lambda index: ids[index])
    assert columns(PathSearch(None), block_of([[0.1, 0.6, 0.3]]), drafter) == [[3, 5]]


# ---- trigrams ----


def test_trigrams_back_off():
    text = Trigrams()
    text.add([1, 2, 3, 1])
    text.add([2, 3, 1, 2, 5])
    one = [(count + 1 / 6) / (9 + 1) for count in (0, 3, 3, 2, 0, 1)]
    two = [(count + p) / (3 + 1) for count, p in zip((0, 0, 0, 2, 0, 1), one)]  # after 2
    three = [(count + p) / (3 + 1) for count, p in zip((0, 0, 0, 2, 0, 1), two)]  # after 1 2
    vocabulary = list(range(6))
    assert text.probs((1, 2), vocabulary, 6) == pytest.approx(three)
    assert text.probs((2,), vocabulary, 6) == pytest.approx(two)
    assert text.probs((4, 2), vocabulary, 6) == pytest.approx(two)  # never seen: one token less
    assert text.probs((1, 4), vocabulary, 6) == pytest.approx(one)
    assert Trigrams().probs((1, 2), vocabulary, 6) == pytest.approx([1 / 6] * 6)
    for before in ((1, 2), (3, 1), (4, 4), ()):
        assert sum(text.probs(before, vocabulary, 6)) == pytest.approx(1)


def test_the_memory_hears_each_rows_text_once():
    torch.manual_seed(0)
    drafter = BlockDrafter(BlockConfig.tiny(corrector={"name": "path"})).eval()
    session = drafter.start(SimpleNamespace(vocab_size=64, end_ids=()), 3)
    for tokens in ([[1, 2, 3], [4], []], [[5], [6, 7], [8]], [[], [9], [10, 11]]):
        session.observe(Commit(tokens))
    assert [row.last for row in session.memory.rows] == [(3, 5), (7, 9), (10, 11)]
    session.keep([2, 0])
    session.observe(Commit([[12], [13]]))
    assert [row.last for row in session.memory.rows] == [(11, 12), (5, 13)]


# ---- paths ----


def marginals(slots=4, seed=0):
    probs = torch.randn(slots, 6, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    probs[:, END] = 1e-4
    return probs.tolist()


def test_marginals_alone_and_one_path_give_the_raw_draft():
    for seed in range(5):
        probs = marginals(seed=seed)
        assert found(PathSearch(None, lambda_=1.0, beam=1), block_of(probs)) == torch.tensor(probs).argmax(-1).tolist()


def score(path, block: Block, text: list[int], lambda_: float) -> float:
    total, before = 0.0, tuple(text[-2:])
    for log_probs, token in zip(block.logits[0].log_softmax(-1).tolist(), path):
        trigram = block.memory.rows[0].probs(before, [token], 6)[0]
        total += lambda_ * log_probs[token] + (1 - lambda_) * math.log(trigram)
        before = (before[1], token)
    return total


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.5])
def test_the_best_path_of_all_within_the_columns(lambda_):
    text = [1, 2, 3, 0, 1, 2, 5, 1, 3, 3, 1, 2]
    for seed in range(5):
        search, block = PathSearch(None, lambda_=lambda_, beam=10_000), block_of(marginals(seed=seed), text)
        best = max(score(path, block, text, lambda_) for path in itertools.product(*columns(search, block)))
        assert score(found(search, block), block, text, lambda_) == pytest.approx(best, abs=1e-4)


def test_the_text_makes_the_slots_fit_each_other():
    """Two phrases, each slot undecided between them: marginals mix them, the search does not."""
    text = [0, 1, 2, 0, 1, 2, 3, 5, 1, 3, 5, 1, 5]
    half = [[0.49, 0.0, 0.0, 0.51, 0.0, 0.0], [0.0, 0.51, 0.0, 0.0, 0.0, 0.49], [0.0, 0.49, 0.51, 0.0, 0.0, 0.0]]
    half = [[p + 1e-9 for p in column] for column in half]
    assert found(PathSearch(None, lambda_=1.0), block_of(half, text)) == [3, 1, 2]
    assert found(PathSearch(None), block_of(half, text)) in ([3, 5, 1], [0, 1, 2])


def test_options_are_checked():
    for options, match in [
        ({"tau": 0.0}, "tau"),
        ({"lambda_": 1.5}, "lambda_"),
        ({"beam": 0}, "beam"),
        ({"max_candidates": 0}, "max_candidates"),
        ({"width": 2}, "no option width"),
    ]:
        with pytest.raises(ValueError, match=match):
            correctors.build(None, {"name": "path", **options})


# ---- through generate ----


def drafter_of(tree_nodes=0, **fields) -> BlockDrafter:
    torch.manual_seed(5)
    fields = {"policy": "fixed", "num_assistant_tokens": 3, "corrector": {"name": "path"}, **fields}
    return BlockDrafter(BlockConfig.tiny(tree_nodes=tree_nodes, **fields)).eval()


@pytest.mark.parametrize("lengths", [LENGTHS[2:3], LENGTHS], ids=["batch1", "batch4"])
@pytest.mark.parametrize("tree_nodes", [0, 7], ids=["beam", "tree"])
def test_greedy_output_is_plains(tree_nodes, lengths):
    model = target("llama")
    assert TARGETS["llama"].trees
    stats = assert_equals_plain(model, plain("llama", None, lengths), drafter_of(tree_nodes))
    assert stats.verified > 0


def test_sampled_output_has_the_targets_law(monkeypatch):
    """Drafts that depend on the text so far, and drafts whose length does."""
    monkeypatch.setattr(test_sampling_law, "ROWS", 2500)
    drafter = drafter_of(vocab_size=test_sampling_law.V, policy={"name": "adl", "k_min": 1}, **BLOCK)
    assert_fits(drafter, "all_warpers")


def test_without_a_text_the_marginals_decide():
    probs = marginals(seed=1)
    block = block_of(probs)
    block.memory = None
    assert found(PathSearch(None), block) == torch.tensor(probs).argmax(-1).tolist()


def test_training_leaves_the_marginals():
    base = torch.randn(2, 3, 6)
    scored = PathSearch(None).teach(None, None, None, base)
    assert scored.logits is base and not list(PathSearch(None).parameters())


# ---- adaptive length ----


def adl(length=30, batch=1, **options) -> AdaptiveDraftLength:
    ends = SimpleNamespace(eos_token_id=[END])
    model = SimpleNamespace(generation_config=ends, can_generate=lambda: True)
    policies.check({"name": "adl", **options})
    return AdaptiveDraftLength(Situation(model, None, batch, 8, FixedLength(length, batch=batch)), **options)


def play(policy, row_lengths: list[tuple[int | None, int]], rounds: int = 1) -> list[int]:
    """Rounds in which each row's block ends after L_gen tokens (None: it does not) and L_acc are accepted."""
    rows = list(range(len(row_lengths)))
    for _ in range(rounds):
        lengths = policy.before(rows)
        logits = torch.zeros(len(rows), max(lengths), 6)
        for row, (said, _) in enumerate(row_lengths):
            logits[row, :, 1] = 1.0
            if said is not None and said < logits.shape[1]:
                logits[row, said, END] = 2.0
        block = Block(logits, None, logits, torch.zeros(len(rows)))
        draft = Draft.chain(logits.argmax(-1), lengths, evidence=block)
        assert policy.cut(draft, [True] * len(rows)) is draft
        policy.observe(rows, lengths, [[1] * (accepted + 1) for _, accepted in row_lengths])
    return policy.before(rows)


PAPER = dict(k_min=20, k_max=30, delta=10)


@pytest.mark.parametrize(("said", "accepted", "want"), [(25, 25, 30), (22, 3, 22), (5, 3, 20), (5, 5, 20)])
def test_lengths_settle_where_the_paper_says(said, accepted, want):
    policy = adl(**PAPER)
    assert policy.before([0]) == [30]
    assert play(policy, [(said, accepted)], rounds=12) == [want]


def test_averages_move_by_rho():
    policy = adl(rho=0.5, k_min=1, delta=10)
    assert play(policy, [(20, 4)]) == [20]
    assert play(policy, [(10, 4)]) == [15]  # (20 + 10) / 2
    assert play(policy, [(10, 4)]) == [12]  # (15 + 10) / 2, floored
    assert play(policy, [(4, 28)]) == [18]  # L_gen (12.5 + 4) / 2 = 8.25, L_acc (4 + 28) / 2 = 16
    assert play(policy, [(None, 0)]) == [13]  # no end in 18 slots: (8.25 + 18) / 2


def test_rows_learn_for_themselves_and_finished_ones_nothing():
    policy = adl(batch=3, **PAPER)
    assert play(policy, [(25, 25), (22, 3), (5, 0)]) == [30, 22, 20]
    policy.cut(Draft.empty(3), [True] * 3)
    policy.observe([0, 1, 2], [0, 0, 0], [[1], [1], []])
    assert policy.before([2, 1, 0]) == [20, 22, 30]


def test_lengths_stay_within_what_is_asked_for():
    policy = adl(length=12)
    assert (policy.k_min, policy.k_max, policy.delta) == (8, 12, 4)  # as 20, 30 and 10 are to 30
    assert adl(length=30).k_min == 20 and adl(length=30).delta == 10
    assert play(adl(length=12, **PAPER), [(2, 0)]) == [12]
    with pytest.raises(ValueError, match="k_min 9 is more than k_max 4"):
        adl(k_min=9, k_max=4)
    with pytest.raises(ValueError, match="rho"):
        adl(rho=0.0)


def test_a_drafter_without_a_block_is_judged_by_its_chain():
    policy = adl(**PAPER)
    tokens = torch.tensor([[1] * 23 + [END] * 7])
    policy.cut(Draft.chain(tokens, [30]), [True])
    policy.observe([0], [30], [[1] * 5])
    assert policy.before([0]) == [23]
