"""The rules are proven on small vocabularies by exact integration and, with real noise, by chi-square.

`Toy.law` measures the joint law of the tokens that a rule emits: over all drafts (weighted by how they were drawn), and
for each draft over all uniforms, whose cells of constant outcome are found by search to the last bit.
"""

import itertools

import pytest
import torch
from scipy.stats import chisquare

from hf_specdraft import trees
from hf_specdraft import verification as rules
from hf_specdraft.draft import Draft, Law

EXACT = 1e-12
CHAIN_1, CHAIN_2, CHAIN_3 = [-1], [-1, 0], [-1, 0, 1]
TREES = {"two": [-1, -1], "three": [-1, -1, -1], "deep": [-1, -1, 0, 0], "uneven": [-1, 0, -1, 2]}


def random_law(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.distributions.utils.probs_to_logits(
        torch.rand(*shape, generator=generator, dtype=torch.float64)
    ).softmax(-1)


class Toy:
    """A target and a drafter given by tables [V^d, V] over the tokens so far, and every draft of one tree shape.

    drawn: "with" or "without" replacement, or "argmax": the likeliest tokens, so that there is one draft.
    """

    def __init__(self, parents, vocab=3, drawn="with", seed=0, p=None, q=None):
        self.parents, self.vocab = parents, vocab
        self.depth = max(len(self._lineage(j)) for j in range(len(parents)))
        generator = torch.Generator().manual_seed(seed)
        sizes = [vocab**d for d in range(self.depth + 1)]
        self.p = [
            torch.tensor([p] * n, dtype=torch.float64) if p else random_law(n, vocab, generator=generator)
            for n in sizes
        ]
        self.q = [
            torch.tensor([q] * n, dtype=torch.float64) if q else random_law(n, vocab, generator=generator)
            for n in sizes
        ]
        self.replacement = drawn != "without"
        drafts = []
        for tokens in itertools.product(range(vocab), repeat=len(parents)):
            weight = 1.0
            for j, parent in enumerate(parents):
                law = self.q[len(self._lineage(parent))][self._number(tokens, parent)].clone()
                earlier = [tokens[i] for i in range(j) if parents[i] == parent]
                if drawn != "with":
                    law[earlier] = 0
                if drawn == "argmax":
                    law = torch.nn.functional.one_hot(law.argmax(), vocab).double()
                weight *= float(law[tokens[j]] / law.sum())
                if not weight > 0:
                    break
            if weight > 0:
                drafts.append((tokens, weight))
        self.tokens = torch.tensor([tokens for tokens, _ in drafts])
        self.weights = torch.tensor([weight for _, weight in drafts], dtype=torch.float64)
        # Per draft: the target's row at anchor and nodes, and the law of each node.
        self.rows = torch.stack([torch.stack([self._row(t, j) for j in range(-1, len(parents))]) for t, _ in drafts])
        self.laws = torch.stack([torch.stack([self._row(t, i, self.q) for i in parents]) for t, _ in drafts])
        self.valid = torch.ones_like(self.tokens, dtype=torch.bool)
        self.drawn = torch.ones(len(drafts), dtype=torch.bool)

    def _lineage(self, node):
        return [] if node < 0 else self._lineage(self.parents[node]) + [node]

    def _number(self, tokens, node):
        number = 0
        for j in self._lineage(node):
            number = number * self.vocab + tokens[j]
        return number

    def _row(self, tokens, node, table=None):
        return (table or self.p)[len(self._lineage(node))][self._number(tokens, node)]

    def repeated(self, times):
        """The same toy with every draft `times` times, to put rows of different kinds into one batch."""
        for name in ("tokens", "rows", "laws", "valid", "drawn"):
            setattr(self, name, torch.cat([getattr(self, name)] * times))
        self.weights = torch.cat([self.weights / times] * times)
        return self

    def draft(self, which, law=True):
        parents = torch.tensor(self.parents).expand(len(which), -1)
        law = Law(self.laws[which], None, self.drawn[which], self.replacement) if law else None
        return Draft(self.tokens[which], parents, self.valid[which], law=law)

    def row_at(self, which):
        rows = torch.arange(len(which))
        table = self.rows[which]
        return lambda index, alive=None: table[rows, index]

    def cells(self, rule, order):
        """Drafts [M], uniforms [M, N+1] inside each cell of constant outcome, and the cells' weights [M]."""
        which, weight = torch.arange(len(self.tokens)), self.weights
        u = torch.full((len(which), len(self.parents) + 1), 0.5, dtype=torch.float64)
        for c in order:
            found, start = [], torch.zeros_like(weight)
            while len(which):
                end = self._end_of_cell(rule, which, u, c, start)
                inside = u.clone()
                inside[:, c] = (start + end) / 2
                found.append((which, inside, weight * (end - start)))
                more = end < 1
                which, u, weight, start = which[more], u[more], weight[more], end[more]
            which, u, weight = (torch.cat(part) for part in zip(*found))
        return which, u, weight

    @staticmethod
    def _end_of_cell(rule, which, u, c, start, ways=8):
        def outcome(value):
            u_value = u.repeat_interleave(value.shape[1], 0)
            u_value[:, c] = value.flatten()
            verdict = rule(which.repeat_interleave(value.shape[1]), u_value)
            return torch.cat([verdict.path, verdict.next_token[:, None]], 1).view(*value.shape, -1)

        first = outcome(start[:, None])
        last = torch.full_like(start, 1 - 2**-53)
        ends = (outcome(last[:, None]) != first).any(2)[:, 0]
        end = torch.ones_like(start)
        if not ends.any():
            return end
        which, u, first, lo, hi = which[ends], u[ends], first[ends], start[ends], last[ends]
        for _ in range(16):
            points = lo[:, None] + (hi - lo)[:, None] * torch.arange(1, ways) / ways
            same = (outcome(points) == first).all(2).cumprod(1).sum(1)
            edges = torch.cat([lo[:, None], points, hi[:, None]], 1)
            lo, hi = edges.gather(1, same[:, None])[:, 0], edges.gather(1, same[:, None] + 1)[:, 0]
        end[ends] = hi
        return end

    def law(self, rule, order=None):
        """[V^(D+1)]: the law of the first D+1 tokens, those after the verdict being the target's own."""
        which, u, weight = self.cells(rule, order or range(len(self.parents) + 1))
        assert weight.sum().item() == pytest.approx(1, abs=EXACT)
        return self._joint(which, rule(which, u), weight)

    def _joint(self, which, verdict, weight):
        mass = [torch.zeros(self.vocab**d, dtype=torch.float64) for d in range(self.depth + 2)]
        number = torch.zeros_like(which)
        for column in verdict.path.T:
            token = self.tokens[which, column.clamp(min=0)]
            number = torch.where(column >= 0, number * self.vocab + token, number)
        number = number * self.vocab + verdict.next_token
        for d in range(1, self.depth + 2):
            here = verdict.length + 1 == d
            mass[d].index_add_(0, number[here], weight[here])
        for d in range(1, self.depth + 1):
            mass[d + 1] += (mass[d][:, None] * self.p[d]).flatten()
        return mass[-1]

    @property
    def target(self):
        joint = self.p[0][0]
        for table in self.p[1:]:
            joint = (joint[:, None] * table).flatten()
        return joint

    def error(self, rule, order=None):
        return (self.law(rule, order) - self.target).abs().max().item()

    def acceptance(self, rule, order=None):
        """Mean number of accepted nodes."""
        which, u, weight = self.cells(rule, order or range(len(self.parents) + 1))
        return (rule(which, u).length * weight).sum().item()

    def p_value(self, rule, rows=100_000):
        """Of the chi-square test that the rule, with real noise, emits the target's law."""
        generator = torch.Generator().manual_seed(0)
        which = torch.multinomial(self.weights, rows, replacement=True, generator=generator)
        verdict = rule(which, torch.rand(rows, len(self.parents) + 1, generator=generator))
        counts = self._sampled(which, verdict, generator)
        return chisquare(counts.numpy(), (self.target * rows).numpy()).pvalue

    def _sampled(self, which, verdict, generator):
        texts = torch.zeros(len(which), dtype=torch.long)
        for d in range(self.depth + 1):
            own = rules.sample(self.p[d][texts], torch.rand(len(which), generator=generator))
            column = verdict.path[:, min(d, verdict.path.shape[1] - 1)].clamp(min=0)
            token = torch.where(verdict.length == d, verdict.next_token, own)
            texts = texts * self.vocab + torch.where(verdict.length > d, self.tokens[which, column], token)
        return texts.bincount(minlength=self.vocab ** (self.depth + 1)).double()

    # The rules, as functions of drafts and uniforms.

    def walk(self, which, u):
        return rules.walk(self.row_at(which), self.draft(which), u[:, :-1], u[:, -1], self.vocab)

    def walk_point(self, which, u):
        return rules.walk(self.row_at(which), self.draft(which, law=False), u[:, :-1], u[:, -1], self.vocab)

    def match(self, which, u):
        draft = self.draft(which)
        return rules.match(rules.sample(self.rows[which], u), draft.tokens, draft.parents, draft.valid)

    def block(self, which, u):
        return rules.block(self.row_at(which), self.draft(which), u[:, :-1], u[:, -1], self.vocab)

    def block_point(self, which, u):
        return rules.block(self.row_at(which), self.draft(which, law=False), u[:, :-1], u[:, -1], self.vocab)

    def lossy(self, which, u):
        return rules.lossy_typical(self.row_at(which), self.draft(which), u[:, -1])

    @property
    def late_first(self):
        """Block verification's order: whether a prefix passes shows only where no longer one does."""
        return [*reversed(range(len(self.parents))), len(self.parents)]


# The output law is the target's


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("parents, vocab", [(CHAIN_1, 4), (CHAIN_2, 4), (CHAIN_3, 3)])
def test_chains_are_exact(parents, vocab, seed):
    toy = Toy(parents, vocab, seed=seed)
    assert toy.error(toy.walk) < EXACT
    assert toy.error(toy.walk_point) < EXACT
    assert toy.error(toy.match) < EXACT
    assert toy.error(toy.block, toy.late_first) < EXACT
    assert toy.error(toy.block_point, toy.late_first) < EXACT
    assert toy.error(toy.lossy) > 1e-3


@pytest.mark.parametrize("drawn", ["with", "without", "argmax"])
@pytest.mark.parametrize("shape", TREES)
def test_trees_are_exact(shape, drawn):
    toy = Toy(TREES[shape], drawn=drawn, seed=5)
    if drawn != "argmax":
        assert toy.error(toy.walk) < EXACT
    assert toy.error(toy.walk_point) < EXACT
    assert toy.error(toy.match) < EXACT
    assert toy.error(toy.lossy) > 1e-3


@pytest.mark.parametrize("rule", ["walk", "block"])
def test_stop_after_a_weak_token_is_exact(rule):
    """A chain that ends after a token of low q has a length of its own in every row."""
    toy = Toy(CHAIN_3, seed=2)
    confident = toy.laws.gather(2, toy.tokens[:, :, None])[:, :, 0] > 0.3
    toy.valid[:, 1:] = confident[:, :-1].cumprod(1).bool()
    assert 0 < toy.valid[:, 1].sum() < len(toy.valid)
    assert toy.error(getattr(toy, rule), toy.late_first if rule == "block" else None) < EXACT


@pytest.mark.parametrize("rule", ["walk", "block"])
def test_drawn_and_point_rows_share_a_batch(rule):
    toy = Toy(CHAIN_2, seed=3).repeated(2)
    toy.drawn[len(toy.drawn) // 2 :] = False
    assert toy.error(getattr(toy, rule), toy.late_first if rule == "block" else None) < EXACT


@pytest.mark.parametrize(
    "rule, parents, drawn",
    [
        ("walk", CHAIN_3, "with"),
        ("walk", TREES["deep"], "with"),
        ("walk", TREES["deep"], "without"),
        ("walk_point", CHAIN_3, "with"),
        ("walk_point", TREES["deep"], "argmax"),
        ("match", TREES["deep"], "argmax"),
        ("block", CHAIN_3, "with"),
    ],
)
def test_law_with_real_noise(rule, parents, drawn):
    toy = Toy(parents, drawn=drawn, seed=4)
    assert toy.p_value(getattr(toy, rule)) > 1e-4


# Wrong rules fail the same checks


def test_soft_law_for_an_argmax_draft_is_caught():
    toy = Toy(CHAIN_2, drawn="argmax")
    assert toy.error(toy.walk) > 1e-2
    assert toy.p_value(toy.walk) < 1e-9


def test_original_law_for_draws_without_replacement_is_caught():
    toy = Toy(TREES["two"], vocab=4, drawn="without", seed=1)
    assert toy.error(toy.walk) < EXACT
    toy.replacement = True
    assert toy.error(toy.walk) > 1e-3
    assert toy.p_value(toy.walk) < 1e-9


def test_cumulative_product_shortcut_is_caught():
    """Deployed in the field: accept while prod u <= prod min(1, p/q); on a failure emit as rule A does."""
    toy = Toy(CHAIN_2)

    def shortcut(which, u):
        draft, rows = toy.draft(which), toy.rows[which]
        p = rows[:, :-1].gather(2, draft.tokens[:, :, None])[:, :, 0]
        q = toy.laws[which].gather(2, draft.tokens[:, :, None])[:, :, 0]
        passes = u[:, :-1].cumprod(1) <= (p / q).clamp(max=1).cumprod(1)
        always, never = torch.zeros_like(p), torch.full_like(p, 1 - 1e-9)
        return rules.walk(toy.row_at(which), draft, torch.where(passes, always, never), u[:, -1], toy.vocab)

    assert toy.p_value(toy.walk) > 1e-4
    assert toy.p_value(shortcut) < 1e-9


def test_shared_noise_is_caught():
    """One uniform for every decision passes no chi-square test, so the rules' own must be independent."""
    for parents, rule in (
        (CHAIN_2, "walk"),
        (CHAIN_2, "walk_point"),
        (CHAIN_2, "block"),
        (TREES["deep"], "walk_point"),
    ):
        toy = Toy(parents, drawn="argmax" if rule == "walk_point" else "with")
        assert toy.p_value(lambda which, u: getattr(toy, rule)(which, u[:, :1].expand_as(u))) < 1e-9  # noqa: B023


def test_dropping_drawn_tokens_demands_point_rows():
    """p = (.5, .5), q = (.9, .1), keep iff q(x) > .5: the law would be (.55, .45), though a kept row lost nothing."""
    toy = Toy([-1], 2, p=[0.5, 0.5], q=[0.9, 0.1])

    def cut(which, u, looked):
        draft = toy.draft(which)
        keep = toy.laws[which].gather(2, draft.tokens[:, :, None])[:, :, 0] > 0.5
        pruned = trees.prune(draft, keep, looked_at_token=looked)
        return rules.walk(toy.row_at(which), pruned, u[:, :-1], u[:, -1], 2)

    assert toy.error(lambda which, u: cut(which, u, True)) < EXACT
    biased = toy.law(lambda which, u: cut(which, u, False)).view(2, 2).sum(1)
    assert biased.tolist() == pytest.approx([0.55, 0.45])


# Known numbers


@pytest.mark.parametrize(
    "rule, parents, drawn, q, expected",
    [
        ("walk", [-1], "with", [0.2, 0.2, 0.6], 0.60),
        ("block", [-1], "with", [0.2, 0.2, 0.6], 0.60),
        ("walk", [-1, -1], "with", [0.2, 0.2, 0.6], 0.76),
        ("walk", [-1, -1], "without", [0.2, 0.2, 0.6], 0.90),
        ("walk", [-1, -1, -1], "without", [0.2, 0.2, 0.6], 1.0),
        ("walk_point", [-1, -1], "argmax", [0.21, 0.19, 0.6], 0.70),
        ("match", [-1, -1], "argmax", [0.21, 0.19, 0.6], 0.70),
    ],
)
def test_worked_node(rule, parents, drawn, q, expected):
    toy = Toy(parents, drawn=drawn, p=[0.5, 0.3, 0.2], q=q)
    assert toy.acceptance(getattr(toy, rule)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("gamma, token_rule, block_rule", [(2, 1.446, 1.482), (4, 2.408, 2.596), (6, 3.015, 3.433)])
def test_block_accepts_more_than_the_chain_rule(gamma, token_rule, block_rule):
    rows, generator = 60_000, torch.Generator().manual_seed(gamma)

    def flat(*shape):  # uniform on the simplex
        law = torch.rand(*shape, 3, generator=generator, dtype=torch.float64).log().neg()
        return law / law.sum(-1, keepdim=True)

    p = flat(rows, gamma + 1)
    q = (p[:, :-1] + flat(rows, gamma)) / 2
    tokens = rules.sample(q, torch.rand(rows, gamma, generator=generator))
    draft = Draft.chain(tokens, [gamma] * rows, law=Law(q, None, torch.ones(rows, dtype=torch.bool)))
    u, e = torch.rand(rows, gamma, generator=generator), torch.rand(rows, generator=generator)
    chain = rules.walk(lambda index, alive: p[torch.arange(rows), index], draft, u, e, 3).length.double().mean().item()
    block = rules.block(lambda index: p[torch.arange(rows), index], draft, u, e, 3).length.double().mean().item()
    # The published means are over a sample of tables.
    assert chain == pytest.approx(token_rule, abs=0.1)
    assert block > chain
    assert block - chain == pytest.approx(block_rule - token_rule, abs=0.07)


@pytest.mark.parametrize("seed", range(3))
def test_block_never_accepts_less(seed):
    for parents in (CHAIN_1, CHAIN_2):
        toy = Toy(parents, seed=seed)
        assert toy.acceptance(toy.block, toy.late_first) >= toy.acceptance(toy.walk) - EXACT


def test_block_of_one_token_is_the_chain_rule():
    toy = Toy(CHAIN_1, 4)
    which = torch.arange(4).repeat(500)
    u = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(toy.block(which, u).path, toy.walk(which, u).path)
    assert torch.equal(toy.block(which, u).next_token, toy.walk(which, u).next_token)


# Edges, in float32 as in use


def chain_of(tokens, q):
    return Draft.chain(
        tokens, [tokens.shape[1]] * len(tokens), law=Law(q, None, torch.ones(len(tokens), dtype=torch.bool))
    )


def both(p, draft, accept, emit):
    """Verdicts of walk and block for rows p [B, N+1, V]."""
    rows = torch.arange(len(p))
    yield rules.walk(lambda index, alive: p[rows, index], draft, accept, emit, p.shape[-1])
    yield rules.block(lambda index: p[rows, index], draft, accept, emit, p.shape[-1])


LAST = 1 - 2**-24  # the largest float32 uniform


def test_equal_laws_accept_everything():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(500, 5, 50, generator=generator).mul(3).softmax(-1)
    tokens = rules.sample(p[:, :-1], torch.rand(500, 4, generator=generator))
    accept = torch.rand(500, 4, generator=generator)
    accept[::2] = LAST
    for verdict in both(p, chain_of(tokens, p[:, :-1].clone()), accept, torch.rand(500, generator=generator)):
        assert (verdict.length == 4).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0, 0.5])
def test_a_node_of_no_law_is_rejected_and_p_emitted(wrong):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(500, 4, 20, generator=generator).softmax(-1)
    tokens = rules.sample(p[:, :-1], torch.rand(500, 3, generator=generator))
    draft = chain_of(tokens, p[:, :-1].clone())
    assert draft.law.checked() is draft.law
    draft.law.probs[::2, 1] *= wrong
    draft.law = draft.law.checked()
    emit = torch.rand(500, generator=generator)
    for verdict in both(p, draft, torch.rand(500, 3, generator=generator), emit):
        assert (verdict.length[::2] == 1).all() and (verdict.length[1::2] == 3).all()
        assert torch.equal(verdict.next_token[::2], rules.sample(p[::2, 1], emit[::2]))


@pytest.mark.parametrize("accept", [0.0, 0.5, LAST])
def test_disjoint_supports_accept_nothing_and_emit_p(accept):
    p = torch.tensor([0.25, 0.75, 0, 0]).expand(100, 3, 4)
    q = torch.tensor([0, 0, 0.5, 0.5]).expand(100, 2, 4)
    tokens = torch.tensor([[2, 3]]).expand(100, 2)
    emit = torch.arange(100) / 100
    for verdict in both(p, chain_of(tokens, q), torch.full((100, 2), accept), emit):
        assert (verdict.length == 0).all()
        assert verdict.next_token.bincount().tolist() == [25, 75]


@pytest.mark.parametrize("accept", [0.0, 0.5, LAST])
def test_a_token_the_target_forbids_is_never_emitted(accept):
    """p(a) = 0, q(a) = 1."""
    p = torch.tensor([0.0, 0.5, 0.5]).expand(64, 2, 3)
    draft = chain_of(torch.zeros(64, 1, dtype=torch.long), torch.tensor([1.0, 0, 0]).expand(64, 1, 3))
    for verdict in both(p, draft, torch.full((64, 1), accept), torch.linspace(0, LAST, 64)):
        assert (verdict.length == 0).all() and (verdict.next_token > 0).all()


def test_forced_rejection_between_nearly_equal_laws_draws_from_p():
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.5 + 1e-7, 0.3 - 1e-7, 0.2]])
    assert torch.equal(rules.residual(p, q), p)
    assert torch.equal(rules.residual(p, p), p)
    torch.testing.assert_close(rules.residual(p, p.flip(1)), torch.tensor([[1.0, 0, 0]]))
    # A law that says more than it gave, as rounding may: the token is rejected although nothing is left of p.
    rows = torch.full((64, 2, 3), 1 / 3)
    draft = chain_of(torch.zeros(64, 1, dtype=torch.long), rows[:, :1] + torch.tensor([1e-7, 0, 0]))
    verdict = rules.walk(lambda i, a: rows[:, 0], draft, torch.full((64, 1), LAST), torch.linspace(0, LAST, 64), 3)
    assert (verdict.length == 0).all()
    assert verdict.next_token.bincount(minlength=3).min() >= 21


def test_a_token_its_law_excludes_is_rejected():
    p = torch.tensor([[[0.5, 0.5]] * 2])
    for verdict in both(
        p,
        chain_of(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[[0.0, 1.0]]])),
        torch.zeros(1, 1),
        torch.zeros(1),
    ):
        assert verdict.length.item() == 0


def test_duplicate_of_a_rejected_sibling_is_rejected():
    p, q = torch.tensor([0.2, 0.8]), torch.tensor([0.9, 0.1])
    parents = torch.tensor([[-1, -1]])
    law = Law(q.expand(1, 2, 2), None, torch.tensor([True]))
    draft = Draft(torch.tensor([[0, 0]]), parents, torch.ones(1, 2, dtype=torch.bool), law=law)
    verdict = rules.walk(lambda index, alive: p[None], draft, torch.tensor([[LAST, 0.0]]), torch.zeros(1), 2)
    assert verdict.length.item() == 0 and verdict.next_token.item() == 1


def test_sparse_and_narrow_laws_equal_dense_ones():
    generator = torch.Generator().manual_seed(3)
    rows = 300
    p = torch.randn(rows, 4, 9, generator=generator).softmax(-1)
    narrow = torch.randn(rows, 3, 5, generator=generator).softmax(-1)  # the drafter has 5 of the 9 tokens
    dense = torch.nn.functional.pad(narrow, (0, 4))
    order = torch.rand(rows, 3, 5, generator=generator).argsort(-1)
    tokens = rules.sample(dense, torch.rand(rows, 3, generator=generator))
    accept, emit = torch.rand(rows, 3, generator=generator), torch.rand(rows, generator=generator)
    sparse = Law(narrow.gather(2, order), order, torch.ones(rows, dtype=torch.bool))
    want = list(both(p, chain_of(tokens, dense), accept, emit))
    for draft in (chain_of(tokens, narrow), Draft.chain(tokens, [3] * rows, law=sparse)):
        for verdict, expected in zip(both(p, draft, accept, emit), want):
            assert torch.equal(verdict.path, expected.path)
            assert torch.equal(verdict.next_token, expected.next_token)


def test_walk_asks_for_one_row_per_depth_and_shows_who_is_alive():
    p = torch.eye(4)[torch.tensor([[1, 2, 3], [0, 2, 3]])]  # row 0 wants 1, 2, 3; row 1 wants 0 and stops at once
    draft = Draft.chain(torch.tensor([[1, 2], [1, 2]]), [2, 2])
    asked = []

    def row_at(index, alive):
        asked.append((index[alive].tolist(), alive.tolist()))
        law = p[torch.arange(2), index].clone()
        law[~alive] = torch.nan
        return law

    verdict = rules.walk(row_at, draft, torch.rand(2, 2), torch.rand(2), 4)
    assert asked == [([0, 0], [True, True]), ([1], [True, False]), ([2], [True, False])]
    assert verdict.path.tolist() == [[0, 1], [-1, -1]]
    assert verdict.next_token.tolist() == [3, 0]


# Greedy


def greedy_verdicts(target, draft):
    """Match on the argmax rows, and walk on one-hot rows; `target` maps a tuple of tokens to the next."""
    words = []
    for b in range(len(draft.tokens)):
        row = [()]
        for token, parent in zip(draft.tokens[b].tolist(), draft.parents[b].tolist()):
            row.append((*row[parent + 1], token))
        words.append([target(word) for word in row])
    chosen = torch.tensor(words)
    yield rules.match(chosen, draft.tokens, draft.parents, draft.valid)
    rows = torch.nn.functional.one_hot(chosen, 16).float()
    yield rules.walk(
        lambda index, alive: rows[torch.arange(len(rows)), index],
        draft,
        torch.rand(draft.shape),
        torch.rand(len(rows)),
        16,
    )


@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_text_does_not_depend_on_the_draft_length(k):
    text = torch.randint(0, 16, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for way in (0, 1):
        out, rounds = [], 0
        while len(out) < 30:
            at = len(out)
            proposal = [(t + 1) % 16 if (at + i) % 5 == 4 else t for i, t in enumerate(text[at : at + k])]
            verdicts = greedy_verdicts(lambda word: text[at + len(word)], Draft.chain(torch.tensor([proposal]), [k]))  # noqa: B023
            verdict = list(verdicts)[way]
            out += [proposal[j] for j in verdict.path[0].tolist() if j >= 0] + verdict.next_token.tolist()
            rounds += 1
        assert out == text[: len(out)]
        # Every fifth token is wrong, so a round ends there at the latest.
        assert rounds == sum(-(-n // (k + 1)) for n in [5] * (len(out) // 5) + [len(out) % 5])


def test_greedy_takes_the_branch_of_the_argmax_though_it_comes_second():
    draft = Draft(torch.tensor([[4, 7, 9, 2]]), torch.tensor([[-1, -1, 0, 1]]), torch.ones(1, 4, dtype=torch.bool))
    answers = {(): 7, (7,): 2, (7, 2): 5, (4,): 9, (4, 9): 1}
    for verdict in greedy_verdicts(answers.__getitem__, draft):
        assert verdict.path.tolist() == [[1, 3]]
        assert verdict.length.tolist() == [2] and verdict.next_token.tolist() == [5]


def test_match_takes_the_first_of_twins():
    """Two siblings with one token have draws of their own: to follow the luckier one would bias the law."""
    draft = Draft(torch.tensor([[3, 3, 4]]), torch.tensor([[-1, -1, 1]]), torch.ones(1, 3, dtype=torch.bool))
    verdict = rules.match(torch.tensor([[3, 5, 4, 6]]), draft.tokens, draft.parents, draft.valid)
    assert verdict.path.tolist() == [[0, -1]] and verdict.next_token.tolist() == [5]
    for verdict in greedy_verdicts(lambda word: 3 + len(word), draft):
        assert verdict.path.tolist() == [[0, -1]] and verdict.next_token.tolist() == [4]


@pytest.mark.parametrize("rule", ["match", "walk", "block", "lossy"])
def test_no_nodes_is_a_plain_step(rule):
    draft = Draft.empty(2)
    p = torch.eye(4)[torch.tensor([[1], [3]])]
    u, emit = torch.rand(2, 0), torch.rand(2)
    verdict = {
        "match": lambda: rules.match(p.argmax(-1), draft.tokens, draft.parents, draft.valid),
        "walk": lambda: rules.walk(lambda index, alive: p[:, 0], draft, u, emit, 4),
        "block": lambda: rules.block(lambda index: p[:, 0], draft, u, emit, 4),
        "lossy": lambda: rules.lossy_typical(lambda index: p[:, 0], draft, emit),
    }[rule]()
    assert verdict.path.shape == (2, 0)
    assert verdict.length.tolist() == [0, 0] and verdict.next_token.tolist() == [1, 3]


@pytest.mark.parametrize("seed", range(3))
def test_match_on_chains_equals_match_on_the_same_chain_as_a_tree(seed):
    """A chain takes a shortcut; a second branch that is never right sends it through the tree code."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (64, 5), generator=generator)
    chosen = torch.randint(0, 2, (64, 6), generator=generator)
    lengths = torch.randint(0, 6, (64,), generator=generator).tolist()
    chain = Draft.chain(tokens, lengths)
    want = rules.match(chosen, tokens, chain.parents, chain.valid)
    branch = torch.full((64, 1), -1)
    parents, valid = torch.cat([chain.parents, branch], 1), torch.cat([chain.valid, branch < 0], 1)
    got = rules.match(torch.cat([chosen, branch], 1), torch.cat([tokens, branch], 1), parents, valid)
    assert torch.equal(got.length, want.length) and torch.equal(got.next_token, want.next_token)
    width = got.path.shape[1]
    assert torch.equal(got.path, want.path[:, :width]) and (want.path[:, width:] == -1).all()


# Typical acceptance


def test_typical_acceptance_by_its_threshold():
    sharp, flat = torch.tensor([0.90, 0.06, 0.03, 0.01]), torch.tensor([0.25, 0.25, 0.25, 0.25])
    # exp(-H) is .66 for the sharp law and .25 for the flat one: thresholds .09 and .075.
    parents = torch.tensor([[-1, -1, 1, 1]])
    draft = Draft(torch.tensor([[1, 0, 3, 2]]), parents, torch.ones(1, 4, dtype=torch.bool))
    p = torch.stack([sharp, sharp, flat, sharp, flat])[None]
    verdict = rules.lossy_typical(lambda index: p[0, index], draft, torch.tensor([0.99]))
    assert verdict.path.tolist() == [[1, 2]]  # node 0 has .06 < .09; twins 2 and 3 tie, the first wins
    assert verdict.next_token.tolist() == [3]
    assert rules.lossy_typical(lambda index: p[0, index], draft, torch.zeros(1), 0.05).path[0, 0] == 1
    assert rules.lossy_typical(lambda index: p[0, index], draft, torch.zeros(1), 0.95, 5.0).length.item() == 0


def test_typical_acceptance_prefers_the_likelier_of_equally_long_paths():
    p = torch.tensor([[0.4, 0.5, 0.1]])
    draft = Draft(torch.tensor([[0, 1]]), torch.tensor([[-1, -1]]), torch.ones(1, 2, dtype=torch.bool))
    assert rules.lossy_typical(lambda index: p, draft, torch.zeros(1)).path.tolist() == [[1]]


# Sampling


def test_sample_inverts_the_cdf():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LAST])
    assert rules.sample(p.expand(6, 6), uniforms).tolist() == [1, 1, 3, 3, 4, 4]
    assert rules.sample(3 * p, torch.tensor(0.5)).item() == 3
    assert rules.sample(p, torch.tensor(1 - 2**-53, dtype=torch.float64)).item() == 4


@pytest.mark.parametrize("vocab", [511, 512, 513, 151_936, 200_000])
def test_sample_in_large_vocabularies(vocab):
    """Every second token is forbidden. Sums in float32 would lose the tail and reach forbidden or missing ids."""
    generator = torch.Generator().manual_seed(vocab)
    p = torch.rand(vocab, generator=generator)
    p[::2] = 0
    p /= p.sum()
    uniforms = torch.cat([torch.rand(61, generator=generator), torch.tensor([0.0, 0.5, LAST])])
    ids = rules.sample(p.expand(64, vocab), uniforms)
    assert (p[ids] > 0).all()
    cdf = p.double().cumsum(0) / p.double().sum()
    assert (uniforms.double() < cdf[ids] + 1e-12).all()
    assert (uniforms.double() > cdf[ids] - p[ids].double() - 1e-9).all()
