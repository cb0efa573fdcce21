"""Lattice correctors: neutral points, walks, what they learn, losslessness in greedy and sampled decoding."""

from dataclasses import replace
from itertools import product

import pytest
import test_sampling_law
import torch
from targets import plain, target
from test_lossless import assert_equals_plain, listening
from test_sampling_law import assert_fits, assert_misfits
from test_unroll_block import LONG, OTHER, SHORT, make_target, pack
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdraft import BlockConfig, BlockDrafter, walkers
from hf_specdraft.correctors.lattice import Candidates, select
from hf_specdraft.draft import Block, Commit, Context, Features
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import FusedContext, Unrolled
from hf_specdraft.verification import argmax

LILICORR = {"name": "lilicorr", "top_k": 4, "hidden_size": 16, "num_heads": 2, "num_layers": 1}
SELECTOR = {"name": "selector", "top_k": 4, "rank": 8}
EMBED = {**SELECTOR, "form": "embed"}
CORRECTORS = {"lilicorr": LILICORR, "selector": SELECTOR, "embed": EMBED}
TEXTS = pack([[LONG, SHORT], [OTHER]])


def make_drafter(corrector, stirred: float = 0.0, **fields):
    """stirred: standard deviation of noise on the corrector's weights, most of which start too small to be seen."""
    torch.manual_seed(3)
    drafter = BlockDrafter(BlockConfig.tiny(corrector=corrector, policy="fixed", initializer_range=0.2, **fields))
    if corrector is not None:
        with torch.no_grad():
            for weight in drafter.corrector.parameters():
                weight.add_(stirred * torch.randn_like(weight))
    return drafter.eval()


def same_backbone(drafter, **fields):
    """A plain drafter of the same network."""
    other = make_drafter(None, **fields)
    state = {name: tensor for name, tensor in drafter.state_dict().items() if not name.startswith("corrector.")}
    other.load_state_dict(state)
    return other


def drafts(drafter):
    heard = []
    assert_equals_plain(target("llama"), plain("llama", None, (5, 11)), listening(drafter, heard))
    return heard


# ---- neutral points ----


@pytest.mark.parametrize(
    "corrector, stirred",
    [
        ({**LILICORR, "top_k": 1}, 0.3),
        ({**SELECTOR, "top_k": 1}, 0.3),
        (SELECTOR, 0.0),
        (EMBED, 0.0),
        ({**SELECTOR, "top_k": 9}, 0.0),
        ({**SELECTOR, "sweeps": 2}, 0.0),
    ],
    ids=["lilicorr-k1", "selector-k1", "selector", "embed", "selector-k9", "selector-sweeps"],
)
def test_neutral_correctors_draft_as_the_plain_drafter(corrector, stirred):
    drafter = make_drafter(corrector, stirred)
    assert drafts(drafter) == drafts(same_backbone(drafter))


def test_stirred_correctors_draft_otherwise():
    for corrector in (LILICORR, SELECTOR):
        drafter = make_drafter(corrector, 1.0)
        assert drafts(drafter) != drafts(same_backbone(drafter))


def test_equal_logits_are_taken_as_the_plain_drafter_takes_them():
    logits = torch.randint(0, 3, (4, 5, 48)).float()
    drafter = make_drafter(SELECTOR)
    for k in (1, 3, 48):
        candidates = Candidates.of(drafter, logits, k)
        assert torch.equal(candidates.logits, logits.topk(k).values)
        assert k == 3 or torch.equal(candidates.index[..., 0], argmax(logits))


# ---- lattices ----


@pytest.mark.parametrize("stirred", [0.0, 0.5])
def test_lilicorr_starts_alive_with_scores_within_its_scale(stirred):
    drafter = make_drafter({**LILICORR, "logit_scale": 5.0}, stirred)
    block = a_block(drafter)
    memory = drafter.corrector.memory(3)
    memory.observe(torch.randn(3, 2, 32), torch.zeros(3, 2), [2, 1, 2])
    state = drafter.corrector.begin(drafter, None, replace(block, memory=memory))
    start, pair = state.start, state.pair
    assert start.dtype == pair.dtype == torch.float32
    assert max(start.abs().max(), pair.abs().max()) <= 5.0 + 1e-5
    assert pair.std() > 0.1


def a_block(drafter, rows=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, drafter.config.num_drafts, 32, generator=generator)
    with torch.no_grad():
        logits = drafter.logits(None, hidden)
    anchor = torch.randint(0, 60, (rows,), generator=generator)
    return Block(logits, drafter.draft_ids, hidden, anchor, drafter.corrector.memory(rows))


@pytest.mark.parametrize("seed", range(5))
def test_sweeps_reach_the_greedy_walk_in_at_most_as_many_as_there_are_slots(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, slots, k = 20, 7, 4
    start = torch.randn(rows, k, generator=generator)
    pair = torch.randn(rows, slots - 1, k, k, generator=generator)
    walk = [start.argmax(-1)]
    for slot in range(slots - 1):
        walk.append(pair[torch.arange(rows), slot, walk[-1]].argmax(-1))
    walk = torch.stack(walk, 1)
    for sweeps in range(1, slots + 1):
        assert torch.equal(select(start, pair, sweeps)[:, :sweeps], walk[:, :sweeps])
    assert not torch.equal(select(start, pair, 1), walk)


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
def test_sweeps_draft_what_the_walk_drafts(corrector):
    walked = make_drafter(corrector, 0.5)
    swept = make_drafter({**corrector, "sweeps": walked.config.num_drafts}, 0.5)
    assert drafts(walked) == drafts(swept)


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
def test_teaching_gives_the_scores_of_the_steps(corrector):
    drafter = make_drafter(corrector, 0.5)
    unrolled = drafter.unroll(TargetView(make_target()), TEXTS, anchors=None)
    part = drafter.corrector
    block = Block(
        drafter.logits(None, unrolled.hidden),
        drafter.draft_ids,
        unrolled.hidden,
        unrolled.previous[:, 0],
        part.recall(unrolled),
    )
    # Along a path of the lattice, since LiLiCorr scores nothing else.
    path = torch.randint(0, 4, (len(unrolled.hidden), drafter.config.num_drafts))
    with torch.no_grad():
        state = part.begin(drafter, None, block)
        tokens = state.candidates.ids.gather(-1, path[..., None])[..., 0]
        previous = torch.cat((unrolled.previous[:, :1], tokens[:, :-1]), 1)
        scored = drafter.score(None, replace(unrolled, previous=previous))
        for slot in range(previous.shape[1]):
            scores, state = part.step(state, slot, previous[:, slot])
            index = torch.searchsorted(drafter.draft_ids, scores.ids)
            taught = scored.logits[:, slot].gather(-1, index)
            torch.testing.assert_close(taught.log_softmax(-1), scores.logits.log_softmax(-1))
            assert torch.equal(scored.chosen[:, slot], index.gather(-1, argmax(scores.logits)[:, None])[:, 0])
    # A law over the whole vocabulary, of the marginals' total within and outside the candidates.
    torch.testing.assert_close(scored.logits.logsumexp(-1), scored.base.logsumexp(-1))


# ---- rows of a batch, and their memory ----


def session_tables(drafter, view, rows, keep=None):
    """start and pair of one round for rows of (features [n, 64], anchor), in a batch of their own."""
    session = drafter.start(view, len(rows))
    counts = [len(features) for features, _ in rows]
    hidden = torch.zeros(len(rows), max(counts), 64)
    for row, (features, _) in enumerate(rows):
        hidden[row, : len(features)] = features
    # In two pieces, so that the memory outlives a round.
    first = [n // 2 for n in counts]
    session.observe(Commit([[0]] * len(rows), Features(hidden[:, : max(1, max(first))], first, [0] * len(rows))))
    context = Context(torch.tensor([anchor for _, anchor in rows]), counts, [3] * len(rows), 3)
    session.block_pass(replace(context, position=first), slice(1, 4))
    rest = [n - f for n, f in zip(counts, first)]
    later = torch.zeros(len(rows), max(rest), 64)
    for row, (features, _) in enumerate(rows):
        later[row, : rest[row]] = features[first[row] :]
    if keep is not None:
        session.keep(keep)
        later, rest, first = later[keep], [rest[r] for r in keep], [first[r] for r in keep]
        context = replace(
            context, anchor=context.anchor[keep], position=[counts[r] for r in keep], lengths=[3] * len(keep)
        )
    session.observe(Commit([[0]] * len(rest), Features(later, rest, first)))
    with torch.no_grad():
        state = drafter.corrector.begin(drafter, view, session.block_pass(context, slice(1, 4)))
    return state.start, state.pair


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
@torch.no_grad()
def test_rows_of_a_batch_know_nothing_of_each_other(corrector):
    drafter, view = make_drafter(corrector, 0.5), TargetView(target("llama"))
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 64, generator=generator), 5 + n) for n in (9, 2, 6)]
    alone = [session_tables(drafter, view, [row]) for row in rows]
    for together, order in (
        (session_tables(drafter, view, rows), [0, 1, 2]),
        (session_tables(drafter, view, [rows[2], rows[0], rows[1]]), [2, 0, 1]),
        (session_tables(drafter, view, rows, keep=[2, 0]), [2, 0]),
    ):
        for row, source in enumerate(order):
            for mine, other in zip(together, alone[source]):
                torch.testing.assert_close(mine[row], other[0])


def test_the_anchor_row_is_the_last_before_the_anchor_and_nothing_without_one():
    drafter = make_drafter(LILICORR)
    memory = drafter.corrector.memory(2)
    context = torch.arange(2 * 3 * 32.0).view(2, 3, 32)
    memory.observe(context, torch.zeros(2, 3), [2, 0])
    assert memory.known.tolist() == [True, False]
    assert torch.equal(memory.rows[0], context[0, 1]) and not memory.rows[1].any()
    rows = torch.randn(2, 30, 32)
    shape = torch.ones(2, 30, dtype=torch.long)
    positions = torch.cat((torch.arange(12), torch.arange(18))).expand(2, 30)
    at = torch.tensor([0, 5, 12, 13, 59])
    unrolled = Unrolled(*[None] * 4, anchors=at, context=FusedContext(rows, shape, positions))
    recalled = drafter.corrector.recall(unrolled)
    assert recalled.known.tolist() == [False, True, False, True, True]
    assert torch.equal(recalled.rows[[1, 3, 4]], rows.flatten(0, 1)[[4, 12, 58]])


# ---- what they learn ----

# Two slots after the anchor: texts by how often they come, and the candidates' ids.
WORLDS = {
    "agreement": {(1, 3): 5, (2, 4): 5},
    # The likeliest single text is not the walk's: by prefixes accepted the walk is worth 0.6 + 0.3, this one 0.4 + 0.4.
    "viterbi": {(1, 3): 3, (1, 4): 3, (2, 5): 4},
}


def world(drafter, texts):
    """(unrolled, base logits) of a drafter whose marginals are the world's and who knows no more."""
    rows = torch.tensor([text for text, count in texts.items() for _ in range(count)])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, 32, generator=generator).expand(len(rows), 2, 32)
    share = torch.stack([torch.bincount(column, minlength=64) for column in rows.T]).float() / len(rows)
    # The second of two equal tokens a little ahead, where the first would be right by chance.
    base = (share + 1e-6).log() + 1e-3 * torch.tensor([0.0, 1.0])[:, None] * torch.arange(64)
    context = FusedContext(
        torch.zeros(1, 1, 32), torch.ones(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)
    )
    previous = torch.stack((torch.full((len(rows),), 9), rows[:, 0]), 1)
    mask = torch.ones_like(rows, dtype=torch.bool)
    anchors = torch.zeros(len(rows), dtype=torch.long)
    return Unrolled(hidden, rows, mask.long(), mask, anchors, previous, context), base.expand(len(rows), 2, 64)


def tau(path, texts):
    """Mean number of tokens of a draft that are accepted."""
    total = sum(texts.values())
    return sum(c * ((t[0] == path[0]) + (t == tuple(path))) for t, c in texts.items()) / total


@pytest.mark.parametrize("name", CORRECTORS)
@pytest.mark.parametrize("world_name", WORLDS)
def test_a_bigram_is_learned_and_the_greedy_walk_is_no_worse_than_the_best_path(world_name, name):
    texts = WORLDS[world_name]
    drafter = make_drafter({**CORRECTORS[name], "top_k": 5}, block_size=3, draft_vocab_size=None)
    part, (unrolled, base) = drafter.corrector, world(drafter, texts)
    term = next(name for name in part.terms if name.endswith("_ce"))
    optimizer = torch.optim.Adam(part.parameters(), lr=0.005 if name == "lilicorr" else 0.02)
    for _ in range(120):
        value = part.teach(drafter, None, unrolled, base).terms[term](None, unrolled.labels, unrolled.mask)
        optimizer.zero_grad()
        value.mean().backward()
        optimizer.step()
    memory = part.recall(unrolled)
    block = Block(base, None, unrolled.hidden, unrolled.previous[:, 0], memory)
    context = Context(block.anchor, [5] * len(base), [2] * len(base), 2)
    with torch.no_grad():
        walked = walkers.chain(drafter, None, part, block, context, [2] * len(base)).tokens[0].tolist()
        state = part.begin(drafter, None, block)
    uncorrected = argmax(base)[0].tolist()
    assert tuple(uncorrected) not in texts or world_name == "viterbi"
    ids, start, pair = state.candidates.ids[0], state.start[0].log_softmax(-1), state.pair[0, 0].log_softmax(-1)
    best = int((start[:, None] + pair).argmax())
    viterbi = [int(ids[0, best // 5]), int(ids[1, best % 5])]
    if world_name == "agreement":
        assert tuple(walked) in texts
        assert tau(walked, texts) == 1.0 > tau(uncorrected, texts)
        for path in product(range(2), range(2)):
            drawn = tuple(int(ids[slot, rank]) for slot, rank in enumerate(path))
            assert (pair[path].exp() > 0.9) == (drawn in texts)
    else:
        assert viterbi == [2, 5]
        assert tau(walked, texts) == pytest.approx(0.9) and tau(viterbi, texts) == pytest.approx(0.8)


def law_of(model):
    def law(states, ids):
        logits = model.lm_head(states)
        return logits if ids is None else logits[..., ids]

    return law


def with_states(batch):
    generator = torch.Generator().manual_seed(5)
    return replace(batch, last_hidden=torch.randn(*batch.input_ids.shape, 32, generator=generator))


@pytest.mark.parametrize("alone", [False, True], ids=["jointly", "alone"])
@pytest.mark.parametrize("name", CORRECTORS)
def test_training_lowers_the_corrector_terms_and_moves_what_it_should(name, alone):
    model, drafter = make_target(), make_drafter({**CORRECTORS[name], "top_k": 24}, 0.02)
    if alone:
        drafter.requires_grad_(False)
        drafter.corrector.requires_grad_(True)
    before = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}
    terms = dict.fromkeys(drafter.corrector.terms, 0.25)
    loss = DraftLoss({"base_ce": 1.0, **terms}, chunk_size=16)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    values = []
    for _ in range(12):
        out = loss(drafter, TargetView(model), with_states(TEXTS), law_of(model), anchors=None)
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        values.append(sum(float(out["terms"][term]) for term in terms))
        assert out["loss"].isfinite()
    if alone:  # jointly, more slots count as the candidates improve
        assert values[-1] < values[0]
    moved = {key for key, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[key])}
    assert any(key.startswith("corrector.") for key in moved)
    assert all(key.startswith("corrector.") for key in moved) == alone


@pytest.mark.parametrize("name", CORRECTORS)
def test_the_loss_is_the_weighted_sum_of_its_terms_however_it_is_cut(name):
    model, drafter = make_target(), make_drafter({**CORRECTORS[name], "top_k": 24}, 0.2)
    terms = {"base_ce": 1.0, **dict.fromkeys(drafter.corrector.terms, 0.25)}
    gradients = []
    for chunk in (None, 5):
        drafter.zero_grad()
        out = DraftLoss(terms, chunk_size=chunk)(
            drafter, TargetView(model), with_states(TEXTS), law_of(model), anchors=None
        )
        torch.testing.assert_close(
            out["loss"].detach(), sum(weight * out["terms"][term] for term, weight in terms.items())
        )
        out["loss"].backward()
        gradients.append({key: p.grad.clone() for key, p in drafter.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key], atol=1e-5, rtol=1e-4)
    # Through the context as well: its projection learns what LiLiCorr wants to know of the last row.
    assert "fc.weight" in gradients[0]


@torch.no_grad()
def test_which_slots_the_terms_are_about():
    drafter = make_drafter({**LILICORR, "logit_scale": 1.0}, 0.2, draft_vocab_size=None)
    base = torch.zeros(3, 3, 64)
    base[..., 10:14] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # the candidates of every slot
    labels = torch.tensor([[10, 13, 11], [10, 20, 11], [10, 11, 12]])
    mask = torch.tensor([[True] * 3, [True] * 3, [True, True, False]])
    context = FusedContext(*(torch.ones(1, 9, *s) for s in ((32,), (), ())))
    previous = torch.cat((torch.full((3, 1), 7), labels[:, :-1]), 1)
    unrolled = Unrolled(torch.randn(3, 3, 32), labels, mask.long(), mask, torch.full((3,), 4), previous, context)
    scored = drafter.corrector.teach(drafter, None, unrolled, base)
    teacher = torch.randn(3, 3, 64)
    labels = labels.where(mask, -1)
    teacher[..., 12] = -9.0  # worse than the text's own token wherever slots count
    for name in ("lilicorr_ce", "lilicorr_penalty", "lilicorr_calibration"):
        value = scored.terms[name](teacher, labels, mask)
        # After a slot whose token is no candidate nothing counts, nor does an anchor whose slots end early.
        assert (value != 0).tolist() == [[True] * 3, [True, False, False], [False] * 3]
    for force_gold, counts in ((True, [True] * 3), (False, [True, False, True])):
        drafter = make_drafter({**SELECTOR, "force_gold": force_gold}, 0.2, draft_vocab_size=None)
        value = drafter.corrector.teach(drafter, None, unrolled, base).terms["selector_ce"](None, labels, mask)
        assert (value != 0).tolist() == [[True] * 3, counts, [True, True, False]]
    drafter = make_drafter({**SELECTOR, "on_walk": 1.0}, draft_vocab_size=None)
    value = drafter.corrector.teach(drafter, None, unrolled, base).terms["selector_ce"](None, labels, mask)
    # The unstirred selector takes 10 everywhere: right in every first slot, wrong in every second.
    assert (value != 0).tolist() == [[True, True, False], [True, True, False], [True, True, False]]


# ---- decoding ----


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("corrector", [LILICORR, SELECTOR], ids=["lilicorr", "selector"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt2"])
def test_greedy_output_is_plain_generates_in_ragged_batches(name, corrector, tree):
    drafter = make_drafter(corrector, 0.5, tree_nodes=6 if tree else 0, convolution={"group_size": 8})
    stats = assert_equals_plain(target(name), plain(name), drafter)
    assert stats.verified > 0


LAWS = {
    "lilicorr": {**LILICORR, "top_k": 3},
    "selector": {**SELECTOR, "top_k": 4},
    "sweeps": {**SELECTOR, "top_k": 3, "sweeps": 1},
}


def law_drafter(corrector):
    sizes = dict(vocab_size=test_sampling_law.V, draft_vocab_size=None, mask_token_id=0, own_embeddings=False)
    return make_drafter(corrector, 0.5, **sizes)


# The walk is the same for all lattices.
@pytest.mark.parametrize(
    "name", ["selector", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lilicorr", "sweeps"))]
)
def test_sampled_walks_keep_the_targets_law(name):
    assert_fits(law_drafter(LAWS[name]), "temperature" if name == "sweeps" else "all_warpers")


def test_marginals_told_as_the_law_of_a_walk_are_noticed(monkeypatch):
    chain = walkers.chain

    def marginal(drafter, view, corrector, block, context, lengths):
        draft = chain(drafter, view, corrector, block, context, lengths)
        probs = block.logits.gather(-1, draft.law.ids[:, : block.logits.shape[1]]).softmax(-1)
        return replace(draft, law=replace(draft.law, probs=probs))

    monkeypatch.setattr(walkers, "chain", marginal)
    assert_misfits(law_drafter({**SELECTOR, "top_k": 6}), "temperature")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
@torch.no_grad()
def test_a_walk_runs_no_network_per_slot(corrector):
    """dcoco.md, check 5, without a clock: as many products for three slots as for fifteen."""
    counts = []
    for size in (4, 16):
        drafter = make_drafter(corrector, block_size=size)
        block = a_block(drafter)
        lengths = [size - 1] * 3
        context = Context(block.anchor, [5] * 3, lengths, size - 1)
        with Products() as products:
            walkers.chain(drafter, None, drafter.corrector, block, context, lengths)
        counts.append(products.count)
    assert counts[0] == counts[1] > 0


def test_bad_options_are_refused():
    for corrector, message in (
        ({**LILICORR, "num_heads": 3}, "num_heads"),
        ({**LILICORR, "top_k": 0}, "top_k"),
        ({**SELECTOR, "form": "table"}, "form"),
        ({**SELECTOR, "on_walk": 2}, "on_walk"),
        ({**SELECTOR, "rank": 0}, "rank"),
        ({**SELECTOR, "sweeps": -1}, "sweeps"),
    ):
        with pytest.raises(ValueError, match=message):
            make_drafter(corrector)
