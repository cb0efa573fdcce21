import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_specdraft import trees
from hf_specdraft.draft import Draft, Law
from hf_specdraft.verification import match

GOLDEN = load_file(Path(__file__).parent / "fixtures" / "ddtree" / "golden.safetensors")
SETS = ("flat", "mid", "peaked", "tied")
BUDGETS = (7, 16, 32, 64, 100)


def tree(*parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents and valid of rows of unequal length."""
    width = max(map(len, parents))
    valid = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in parents])
    return torch.tensor([row + [-1] * (width - len(row)) for row in parents]), valid


def golden(name: str, budget: int) -> dict[str, torch.Tensor]:
    prefix = f"{name}.B{budget}."
    return {key.removeprefix(prefix): value for key, value in GOLDEN.items() if key.startswith(prefix)}


def build(name: str, budget: int):
    log_probs = GOLDEN[f"{name}.logits"].log_softmax(-1)[None]
    return trees.from_marginals(log_probs, budget, [log_probs.shape[1]])


# Structure


def test_structure_of_a_tree_with_padding():
    parents, valid = tree([-1, -1, 0, 2, 1], [-1, 0])
    assert trees.depths(parents, valid).tolist() == [[1, 1, 2, 3, 2], [1, 2, 1, 1, 1]]
    expected = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]
    lineage = trees.ancestors(parents, valid)
    assert lineage[0].long().tolist() == expected
    assert torch.equal(lineage[1, 2:], torch.eye(5, dtype=torch.bool)[2:])
    table = trees.children(parents, valid)
    assert table[0].tolist() == [[0, 1], [2, 5], [4, 5], [3, 5], [5, 5], [5, 5]]
    assert table[1].tolist() == [[0, 5], [1, 5], [5, 5], [5, 5], [5, 5], [5, 5]]
    assert not trees.is_chain(parents, valid)
    assert trees.is_chain(parents[1:], valid[1:])


def test_structure_of_a_chain_and_of_nothing():
    chain = Draft.chain(torch.zeros(2, 4, dtype=torch.long), [4, 2])
    assert trees.is_chain(chain.parents, chain.valid)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(trees.visibility(trees.ancestors(chain.parents, chain.valid))[0], causal)
    nothing = Draft.empty(3)
    assert trees.is_chain(nothing.parents, nothing.valid)
    assert trees.visibility(trees.ancestors(nothing.parents, nothing.valid)).tolist() == [[[True]]] * 3
    assert trees.children(nothing.parents, nothing.valid).tolist() == [[[0]]] * 3


# Best-first trees


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", SETS)
def test_golden_tree(name, budget):
    want = golden(name, budget)
    tokens, parents, valid, scores = build(name, budget)
    torch.testing.assert_close(scores[0], want["node_log_prob"], atol=1e-5, rtol=0)
    assert valid.all() and valid.shape == (1, budget)
    if name == "tied":  # equally likely nodes lie on both sides of the cut
        return
    assert torch.equal(tokens[0], want["token_ids"])
    assert torch.equal(parents[0] + 1, want["parents"][1:])
    assert torch.equal(trees.depths(parents, valid)[0], want["depths"])
    assert torch.equal(trees.visibility(trees.ancestors(parents, valid))[0], want["visibility"])


@pytest.mark.parametrize("budget", (16, 64))
@pytest.mark.parametrize("name", SETS)
def test_golden_mask_and_walk(name, budget):
    want = golden(name, budget)
    tokens, parents = want["token_ids"][None], want["parents"][None, 1:] - 1
    valid = torch.ones_like(parents, dtype=torch.bool)
    mask = torch.nn.functional.pad(trees.visibility(trees.ancestors(parents, valid)), (20, 0), value=True)
    assert torch.equal(mask[:, None], want["verify_mask_allowed"])
    verdict = match(want["posterior"], tokens, parents, valid)
    accepted = want["accepted_indices"][1:] - 1
    assert verdict.length.item() == len(accepted)
    assert verdict.path[0, : len(accepted)].tolist() == accepted.tolist()
    assert verdict.next_token.tolist() == want["next_token"].tolist()


def test_ties_pop_the_smaller_rank_tuple_first():
    half = math.log(0.5)
    tokens, parents, scores = trees.best_first([[half, half], [0.0]], [[7, 8], [9]], budget=9)
    # (0) before its extension (0, 0), and that before (1): all three have probability one half.
    assert (tokens, parents) == ([7, 9, 8, 9], [-1, 0, -1, 2])
    assert scores == [half] * 4


def test_best_first_takes_the_likeliest_prefixes():
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.rand(3, 4, generator=generator, dtype=torch.float64).log_softmax(-1)
    prefixes = sorted(
        (
            (sum(log_probs[s, v].item() for s, v in enumerate(prefix)), prefix)
            for depth in (1, 2, 3)
            for prefix in itertools.product(range(4), repeat=depth)
        ),
        reverse=True,
    )
    for budget in range(1, 85):
        tokens, parents, valid, scores = trees.from_marginals(log_probs[None], budget, [3])
        words = []
        for token, parent in zip(tokens[0].tolist(), parents[0].tolist()):
            words.append((*(words[parent] if parent >= 0 else ()), token))
        assert set(words) == {prefix for _, prefix in prefixes[:budget]}
        assert scores[0].tolist() == pytest.approx([score for score, _ in prefixes[:budget]])
    assert trees.from_marginals(log_probs[None], 1000, [3])[0].shape == (1, 84)


def test_certain_marginals_give_the_greedy_chain():
    log_probs = torch.full((1, 5, 6), -50.0)
    log_probs[0, range(5), [3, 1, 4, 1, 5]] = 0
    tokens, parents, valid, _ = trees.from_marginals(log_probs, 5, [5])
    assert tokens.tolist() == [[3, 1, 4, 1, 5]]
    assert trees.is_chain(parents, valid) and valid.all()


def test_rows_have_their_own_lengths_and_impossible_tokens_are_left_out():
    log_probs = torch.full((3, 2, 4), -math.inf)
    log_probs[:, :, :2] = math.log(0.5)
    tokens, parents, valid, scores = trees.from_marginals(log_probs, 30, [2, 0, 1])
    assert valid.sum(1).tolist() == [6, 0, 2]
    assert (parents[~valid] == -1).all() and (scores[~valid] == -math.inf).all()
    assert set(tokens[valid].tolist()) == {0, 1}
    assert trees.from_marginals(log_probs, 30, [0, 0, 0])[0].shape == (3, 0)


def test_expected_acceptance_is_the_sum_of_node_probabilities():
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(1, 3, 5, generator=generator).mul(2).log_softmax(-1)
    tokens, parents, valid, scores = trees.from_marginals(log_probs, 12, [3])
    texts = torch.distributions.Categorical(logits=log_probs[0]).sample((40_000,))
    depth = trees.depths(parents, valid)[0]
    depth = torch.cat([torch.zeros(1, dtype=torch.long), depth])  # the text's token after d tokens
    chosen = torch.nn.functional.pad(texts, (0, 1))[:, depth]
    many = len(texts)
    verdict = match(chosen, tokens.expand(many, -1), parents.expand(many, -1), valid.expand(many, -1))
    assert verdict.length.double().mean().item() == pytest.approx(scores.exp().sum().item(), abs=0.02)


# Cost-aware stop (CaDDTree)


def size(cost, budget=40, seed=0):
    log_probs = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)
    return trees.from_marginals(log_probs, budget, [4], cost)


def test_constant_cost_spends_the_whole_budget():
    assert size((0.0, lambda n: 1.0))[2].sum() == 40


def test_cost_in_proportion_to_tokens_stops_at_once():
    assert size((0.0, lambda n: 1.0 + n))[2].sum() == 0


@pytest.mark.parametrize("seed", range(10))
def test_stop_is_the_best_size(seed):
    cost = (0.3, lambda n: 1.0 + 0.01 * n + 0.001 * n**2)
    everything = size(None, seed=seed)[3][0].exp()
    phi = torch.cat([torch.ones(1), 1 + everything.cumsum(0)])
    theta = [phi[n] / (cost[0] + cost[1](n)) for n in range(41)]
    tokens, parents, valid, scores = size(cost, seed=seed)
    assert 0 < valid.sum() < 40
    assert valid.sum() == max(range(41), key=theta.__getitem__)
    assert torch.equal(scores[0].exp(), everything[: valid.sum()])


# Merge and prune


def test_merge_shares_prefixes_and_keeps_order():
    parents, valid = tree([-1, 0, 0], [-1])
    first = Draft(torch.tensor([[5, 6, 7], [1, 0, 0]]), parents, valid, confidence=torch.tensor([[0.9, 0.5, 0.4]] * 2))
    parents, valid = tree([-1, -1, 1, 2], [-1, 0])
    second = Draft(torch.tensor([[8, 5, 7, 9], [1, 2, 0, 0]]), parents, valid, confidence=torch.full((2, 4), 0.1))
    union = trees.merge(first, second)
    assert union.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert union.parents.tolist() == [[-1, 0, 0, -1, 2], [-1, 0, -1, -1, -1]]
    assert union.valid.sum(1).tolist() == [5, 2]
    torch.testing.assert_close(union.confidence[0], torch.tensor([0.9, 0.5, 0.4, 0.1, 0.1]))
    assert not union.is_chain and union.law is None
    second.confidence = None
    assert trees.merge(first, second).confidence is None


def test_merge_of_duplicates_gives_a_chain_and_merge_of_nothing_nothing():
    parents, valid = tree([-1, -1, 1])
    duplicated = Draft(torch.tensor([[4, 4, 5]]), parents, valid)
    alone = trees.merge(duplicated)
    assert alone.tokens.tolist() == [[4, 5]] and alone.is_chain
    assert trees.merge(Draft.empty(2), Draft.empty(2)).shape == (2, 0)


def drawn_tree(replacement: bool) -> Draft:
    parents, valid = tree([-1, -1, 0, 0, 1, 2], [-1, 0, -1])
    tokens = torch.arange(12).view(2, 6)
    probs = torch.arange(12.0).view(2, 6, 1).expand(2, 6, 3)
    law = Law(probs, probs.long() + 100, torch.tensor([True, True]), replacement)
    return Draft(tokens, parents, valid, law=law, confidence=tokens / 12, confidence_kind="prior")


def test_prune_drops_descendants_and_reindexes_everything():
    draft = drawn_tree(replacement=True)
    keep = torch.tensor([[True, True, False, True, True, True], [True, False, True, True, True, True]])
    pruned = trees.prune(draft, keep, looked_at_token=False)
    assert pruned.tokens.tolist() == [[0, 1, 3, 4], [6, 8, 7, 9]]  # the last two of row 1 are padding
    assert pruned.parents.tolist() == [[-1, -1, 0, 1], [-1, -1, -1, -1]]
    assert pruned.valid.tolist() == [[True] * 4, [True, True, False, False]]
    torch.testing.assert_close(pruned.confidence, pruned.tokens / 12)
    assert torch.equal(pruned.law.probs[:, :, 0].long(), pruned.tokens)
    assert torch.equal(pruned.law.ids[:, :, 0], pruned.tokens + 100)
    assert pruned.law.rows.tolist() == [True, True]
    assert not pruned.is_chain


def test_prune_that_looked_at_tokens_leaves_point_rows_only():
    draft = drawn_tree(replacement=True)
    assert trees.prune(draft, torch.ones_like(draft.valid), looked_at_token=True).law is None


def test_prune_between_siblings_without_replacement_demotes_the_row():
    draft = drawn_tree(replacement=False)
    keep = torch.ones_like(draft.valid)
    keep[0, 2] = False  # the earlier of node 0's two children
    keep[1, 2] = False  # the later of the anchor's two children
    assert trees.prune(draft, keep, looked_at_token=False).law.rows.tolist() == [False, True]


def test_pruned_chain_is_a_shorter_chain():
    draft = Draft.chain(torch.arange(8).view(2, 4), [4, 3])
    keep = torch.tensor([[True, True, False, True], [False, True, True, True]])
    pruned = trees.prune(draft, keep, looked_at_token=True)
    assert pruned.is_chain and pruned.valid.tolist() == [[True, True], [False, False]]
    assert pruned.tokens[0].tolist() == [0, 1]
    assert trees.prune(draft, torch.zeros_like(keep), looked_at_token=True).shape == (2, 0)
