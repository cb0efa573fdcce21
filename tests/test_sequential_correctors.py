"""The Markov head, the GRU head and the confidence head: in steps as in teaching, neutral at first, exact in law."""

import copy
import math

import pytest
import torch
from test_block import commit, context, make_drafter, make_target, view  # noqa: F401 (a fixture)
from test_sampling_law import BLOCK, assert_fits, assert_misfits
from test_sampling_law import family_drafter as law_drafter
from torch import nn

from hf_specdraft.confidence import (
    calibrate,
    expected_calibration_error,
    factors,
    rounds,
    sequential_temperatures,
)
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.parts import Scored
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.objectives import acceptance
from hf_specdraft.training.records import TrainingBatch, Unrolled
from hf_specdraft.trees import prune

HEADS = {
    "vanilla": {"name": "markov", "rank": 4},
    "gated": {"name": "markov", "rank": 4, "kind": "gated"},
    "rnn": {"name": "markov", "rank": 4, "kind": "rnn"},
    "gru": {"name": "gru", "rank": 4, "hidden_size": 6},
    "gru from the first": {"name": "gru", "rank": 4, "hidden_size": 6, "free_slots": 0},
}
both_conventions = pytest.mark.parametrize("anchor_drafts", [False, True])
each_head = pytest.mark.parametrize("head", HEADS)


def shaken(drafter: BlockDrafter, std: float = 0.7) -> BlockDrafter:
    """Every weight of its parts random, so that each of them acts."""
    generator = torch.Generator().manual_seed(3)
    for part in (drafter.corrector, drafter.confidence):
        for tensor in () if part is None else part.parameters():
            nn.init.normal_(tensor, std=std, generator=generator)
    return drafter


def proposed(drafter, view, **fields):  # noqa: F811
    """One draft of three ragged rows."""
    session = drafter.start(view, 3)
    session.observe(commit([(0, 0, 5), (1, 0, 12), (2, 0, 1)]))
    depth = drafter.config.num_drafts
    torch.manual_seed(7)
    with torch.no_grad():
        return session.propose(context([3, 4, 50], [5, 12, 1], [depth, depth, 2], **fields))


def taught(drafter, view, block, tokens) -> Scored:  # noqa: F811
    """What the slots say by teaching, along drafted tokens [B, S]."""
    previous = torch.cat((block.anchor[:, None], tokens[:, :-1]), 1)
    unrolled = Unrolled(block.hidden, tokens, tokens, tokens > -1, block.anchor, previous)
    with torch.no_grad():
        return drafter.corrector.teach(drafter, view, unrolled, block.logits)


# ---- correctors ----


@both_conventions
@each_head
def test_steps_equal_teaching_along_the_same_tokens(head, anchor_drafts, view):  # noqa: F811
    """Domino's check 1. Walkers fork: two of each row, which go different ways, the rows in another order."""
    drafter = shaken(make_drafter(corrector=HEADS[head], anchor_drafts=anchor_drafts))
    block = proposed(drafter, view).evidence
    order = torch.tensor([2, 0, 1, 0, 2, 1])
    tokens = torch.randint(64, (6, drafter.config.num_drafts), generator=torch.Generator().manual_seed(1))
    previous, logits = block.anchor[order], []
    with torch.no_grad():
        state = drafter.corrector.begin(drafter, view, block).fork(order)
        for slot in range(tokens.shape[1]):
            before = copy.deepcopy(state.carry)
            scores, after = drafter.corrector.step(state, slot, previous)
            assert before is None or torch.equal(before, state.carry)
            logits.append(scores.logits)
            state, previous = after, tokens[:, slot]
    rows = copy.copy(block)
    rows.hidden, rows.logits, rows.anchor = block.hidden[order], block.logits[order], block.anchor[order]
    scored = taught(drafter, view, rows, tokens)
    torch.testing.assert_close(torch.stack(logits, 1), scored.logits, atol=1e-5, rtol=0)
    assert torch.equal(scored.base, rows.logits)
    assert (scored.logits - scored.base).abs().amax((0, 2))[1:].min() > 0.01


@both_conventions
@each_head
def test_a_new_head_changes_nothing(head, anchor_drafts, view):  # noqa: F811
    """DSpark's check 1, Domino's check 2: greedy and drawn, bit for bit."""
    plain = make_drafter(anchor_drafts=anchor_drafts)
    grown = plain.grown(corrector=HEADS[head])
    for fields in ({}, {"do_sample": True, "warp": lambda scores: scores / 2}):
        ours, theirs = proposed(grown, view, **fields), proposed(plain, view, **fields)
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.valid, theirs.valid)
        assert torch.equal(ours.confidence, theirs.confidence)
        assert (ours.law is None) == (theirs.law is None) == (not fields)
        if fields:
            assert torch.equal(ours.law.probs, theirs.law.probs) and torch.equal(ours.law.ids, theirs.law.ids)
    shaken(grown)
    assert not torch.equal(proposed(grown, view).tokens, proposed(plain, view).tokens)


@both_conventions
def test_dominos_first_drafts_are_the_blocks_own(anchor_drafts, view):  # noqa: F811
    for free in (0, 1, 2, 9):
        options = {**HEADS["gru"], "free_slots": free}
        drafter = shaken(make_drafter(corrector=options, anchor_drafts=anchor_drafts))
        draft = proposed(drafter, view)
        moved = (taught(drafter, view, draft.evidence, draft.tokens).logits != draft.evidence.logits).any(-1).any(0)
        assert moved.tolist() == [slot >= free for slot in range(len(moved))]


def test_the_markov_table_is_read_by_target_ids_and_speaks_the_drafts_own(view):  # noqa: F811
    drafter = shaken(make_drafter(corrector=HEADS["vanilla"]))
    head = drafter.corrector
    assert head.markov_w1.weight.shape == (64, 4) and head.markov_w2.weight.shape == (48, 4)
    draft = proposed(drafter, view)
    previous = torch.cat((draft.evidence.anchor[:, None], draft.tokens[:, :-1]), 1)
    wanted = draft.evidence.logits + head.markov_w1.weight[previous] @ head.markov_w2.weight.T
    assert torch.equal(draft.tokens, drafter.draft_ids[wanted.argmax(-1)])
    assert draft.tokens.max() > 47  # which are no rows of the reduced vocabulary


@each_head
def test_heads_padded_to_other_sizes_than_the_targets(head):
    """Rows beyond the target's vocabulary are dropped; the target's tokens without a row are drafted uncorrected."""
    for rows in (61, 67):
        view = TargetView(make_target())  # noqa: F811
        fields = dict(vocab_size=rows, draft_vocab_size=None, own_embeddings=False, own_head=False, mask_token_id=9)
        drafter = shaken(make_drafter(corrector=HEADS[head], **fields))
        block = proposed(drafter, view).evidence
        tokens = torch.full((3, drafter.config.num_drafts), 63)
        change = taught(drafter, view, block, tokens).logits - block.logits
        assert change.shape[-1] == 64
        assert bool((change[:, 1:, :60] != 0).any()) and bool((change[..., rows:] == 0).all())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"name": "markov", "kind": "lstm"}, "vanilla, gated, rnn, got 'lstm'"),
        ({"name": "markov", "rank": 0}, "rank of the Markov head must be at least 1"),
        ({"name": "gru", "free_slots": -1}, "free_slots of the GRU head must be at least 0"),
        ({"name": "markov", "width": 3}, "markov has no option width; it has rank, kind"),
    ],
)
def test_refuses_options_that_make_no_head(options, message):
    with pytest.raises(ValueError, match=message):
        make_drafter(corrector=options)
    with pytest.raises(ValueError, match="give vocab_size"):
        sizes = dict(own_embeddings=False, own_head=False, draft_vocab_size=None)
        BlockDrafter(BlockConfig.tiny(vocab_size=None, corrector={"name": options["name"]}, **sizes))


# ---- growing ----


def test_growing_keeps_what_was_trained():
    plain = make_drafter()
    grown = plain.grown(corrector=HEADS["vanilla"], confidence={"with_markov": True})
    mine, theirs = plain.state_dict(), grown.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in mine.items())
    assert {name.split(".")[0] for name in set(theirs) - set(mine)} == {"corrector", "confidence"}
    assert plain.config.corrector is None and grown.config.corrector == HEADS["vanilla"]
    assert not grown.training and plain.train().grown(corrector=HEADS["vanilla"]).training
    again = grown.grown(confidence={"with_markov": True, "temperatures": [2.0]})
    assert torch.equal(again.confidence.proj.weight, grown.confidence.proj.weight)
    assert grown.to(torch.bfloat16).grown(num_assistant_tokens=2).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="confidence=None leaves no room for the trained weights confidence.proj.bias"):
        grown.grown(confidence=None)
    with pytest.raises(ValueError, match="leaves no room for the trained weights .*lm_head.weight"):
        plain.grown(draft_vocab_size=32)


# ---- the law ----


CORRECTED = {
    "markov": dict(corrector=HEADS["vanilla"]),
    "rnn and confidence by rule A": dict(
        corrector=HEADS["rnn"], confidence={"with_markov": True}, verification="token"
    ),
    "gru": dict(corrector=HEADS["gru"]),
    "gru, points": dict(corrector=HEADS["gru"], draft_sampling=False),
}
# The Markov table is drawn from in `test_a_cut_before_the_first_unsure_slot_keeps_the_law`, too.
SLOW = ("gru, points", "markov")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CORRECTED])
@pytest.mark.parametrize("request_name", ["all_warpers", pytest.param("penalty", marks=pytest.mark.slow)])
def test_drawn_chains_have_the_targets_law(name, request_name):
    assert_fits(shaken(law_drafter("specdraft_block", **BLOCK, **CORRECTED[name])), request_name)


def cutting(drafter, keep):
    """The drafter, its drafts cut to the nodes that `keep` (factors [B, N]) -> [B, N] leaves, which says of itself that
    it looked at no token. `lost` counts the others."""
    other = copy.copy(drafter)
    other.lost = 0

    def start(view, batch):  # noqa: F811
        session = drafter.start(view, batch)
        propose = session.propose

        def cut(asked):
            draft = propose(asked)
            if not draft.shape[1]:
                return draft
            left = keep(factors(draft))
            other.lost += int((draft.valid & ~left).sum())
            return prune(draft, left, looked_at_token=False)

        session.propose = cut
        return session

    other.start = start
    return other


def unsure(sharp: float = 8.0, **fields):
    """A drafter whose confidence depends much on the token before."""
    corrected = dict(corrector=HEADS["vanilla"], confidence={"with_markov": True})
    drafter = shaken(law_drafter("specdraft_block", **BLOCK, **corrected, **fields))
    with torch.no_grad():
        drafter.confidence.proj.weight[:, -4:] *= sharp
        drafter.confidence.proj.weight[:, :-4] = 0
    return drafter


@pytest.mark.parametrize("verification", ["block", "token"])
def test_a_cut_before_the_first_unsure_slot_keeps_the_law(verification):
    """DSpark's check 2: c_k has seen the tokens before x_k alone."""
    drafter = cutting(unsure(verification=verification), lambda c: (c >= 0.5).cumprod(1).bool())
    stats = assert_fits(drafter, "temperature")
    assert drafter.lost > stats.verified / 10


def test_looking_past_a_slot_is_noticed():
    """Without the early stop, x_k's own value decides (by c_{k+1}) whether x_k is verified."""

    def without_early_stop(c):
        later = torch.cat((c[:, 1:], c.new_ones(len(c), 1)), 1)
        return (later >= 0.5).cumprod(1).bool()

    assert_misfits(cutting(unsure(), without_early_stop), "temperature")


# ---- confidence ----


def test_what_a_confidence_has_seen(view):  # noqa: F811
    """Its kind: no token, or those before its own; and it is the survival of the factors."""
    for fields, kind in (
        (dict(confidence={}), "prior"),
        (dict(confidence={}, corrector=HEADS["gru"]), "prior"),
        (dict(confidence={"with_markov": True}, corrector=HEADS["gated"]), "pre"),
        (dict(corrector=HEADS["gated"]), "pre"),
    ):
        drafter = shaken(make_drafter(**fields))
        draft = proposed(drafter, view)
        assert draft.confidence_kind == kind and draft.confidence.shape == draft.shape
        torch.testing.assert_close(factors(draft).cumprod(1), draft.confidence)
        if drafter.confidence is None:
            assert draft.evidence.confidence is None
            scored = taught(drafter, view, draft.evidence, draft.tokens).logits
            torch.testing.assert_close(factors(draft), scored.softmax(-1).amax(-1))
            continue
        torch.testing.assert_close(factors(draft), draft.evidence.confidence.sigmoid())
        if kind == "prior":
            drawn = proposed(drafter, view, do_sample=True)
            assert not torch.equal(drawn.tokens, draft.tokens)
            assert torch.equal(drawn.confidence, draft.confidence)


def test_labels_are_the_exact_acceptance(view):  # noqa: F811
    """DSpark's check 3: 1 where the laws agree, 0 where they have nothing in common; the law gets no gradient."""
    drafter = make_drafter(confidence={})
    hidden = torch.randn(3, 1, 32)
    logits = torch.tensor([[[5.0, 1.0, -99.0]], [[-99.0, -99.0, 3.0]], [[0.0, 0.0, -99.0]]], requires_grad=True)
    teacher = torch.tensor([[[5.0, 1.0, -99.0]], [[5.0, 1.0, -99.0]], [[99.0, 0.0, 0.0]]])
    scored, labels = Scored(logits), torch.zeros(3, 1, dtype=torch.long)
    unrolled = Unrolled(hidden.requires_grad_(), labels, labels, labels == 0, labels[:, 0], labels)
    drafter.confidence.teach(drafter, view, unrolled, scored)
    value = scored.terms["confidence"](teacher, labels, labels == 0)
    said = drafter.confidence(drafter, view, hidden, None)
    label = torch.tensor([[1.0], [0.0], [0.5]])
    torch.testing.assert_close(value, nn.functional.softplus(said) - label * said)
    assert not scored.terms["confidence"](teacher, labels - 1, labels == 0).any()  # not to be drafted
    value.sum().backward()
    assert logits.grad is None and hidden.grad is not None and drafter.confidence.proj.weight.grad is not None


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(confidence={"with_markov": True}), "with_markov reads a Markov head"),
        (dict(confidence={"with_markov": True}, corrector=HEADS["gru"]), "with_markov reads a Markov head"),
        (dict(confidence={"alpha": 1.0}), "confidence has no option alpha; it has with_markov, temperatures"),
        (dict(confidence={"temperatures": [1.0, 0.0]}), "temperatures must be numbers above 0"),
    ],
)
def test_refuses_options_that_make_no_confidence(fields, message):
    with pytest.raises(ValueError, match=message):
        make_drafter(**fields)


def test_sequential_temperatures_calibrate_the_survival():
    """A head that is over-confident, more so at later slots, whose true factors are known."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(6000, 5, generator=generator) + 1
    accepted = (torch.rand(true.shape, generator=generator) < true.sigmoid()).long().cumprod(1).sum(1)
    drafted = torch.randint(1, 6, (len(true),), generator=generator)
    accepted = accepted.minimum(drafted)
    over = torch.tensor([2.0, 2.0, 3.0, 3.0, 4.0])
    logits = true * over
    half = slice(0, 3000)
    temperatures = sequential_temperatures(logits[half], drafted[half], accepted[half])
    assert all(0.7 < t / o < 1.4 for t, o in zip(temperatures, over.tolist())), temperatures

    def error(logits, slot):
        some = drafted[3000:] > slot
        chance = logits[3000:, : slot + 1].sigmoid().prod(1)[some]
        return expected_calibration_error(chance, (accepted[3000:] > slot)[some])

    for slot in range(5):
        before, after = error(logits, slot), error(logits / torch.tensor(temperatures), slot)
        assert before > 0.04 and after < error(true, slot) + 0.015, (slot, before, after)


def test_expected_calibration_error_of_known_cases():
    chance = torch.tensor([0.05, 0.05, 0.95, 0.95, 1.0])
    assert expected_calibration_error(chance, torch.tensor([0, 0, 1, 1, 1]).bool()) == pytest.approx(0.04)
    assert expected_calibration_error(chance, torch.tensor([1, 1, 0, 0, 0]).bool()) == pytest.approx(0.96, abs=1e-6)
    assert expected_calibration_error(torch.full((4,), 0.5), torch.tensor([1, 0, 1, 0]).bool()) == 0


def test_calibration_is_saved_with_the_drafter(tmp_path):
    target = make_target(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    fields = dict(corrector=HEADS["vanilla"], confidence={"with_markov": True}, tree_nodes=8)
    drafter = shaken(make_drafter(**fields))
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6, 7])]
    seen = rounds(target, drafter, prompts, max_new_tokens=24)
    logits, drafted, accepted = seen
    depth = drafter.config.num_drafts
    assert logits.shape == (len(drafted), depth) and bool((accepted <= drafted).all()) and bool((drafted > 0).all())
    # Every round but each row's last, whose tokens together make the text.
    assert 48 - 2 * (depth + 1) <= int((accepted + 1).sum()) + 2 <= 48
    temperatures = calibrate(target, drafter, prompts, max_new_tokens=24)
    assert temperatures == sequential_temperatures(*seen) and any(t != 1 for t in temperatures)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert again.config.confidence == {"with_markov": True, "temperatures": temperatures}
    raw = torch.tensor([[1.0, -2.0, 0.5]])
    wanted = (raw / torch.tensor(temperatures)).sigmoid().cumprod(1)
    torch.testing.assert_close(again.confidence.survival(raw), wanted)
    assert drafter.config.tree_nodes == 8 and drafter.config.policy == "auto"  # as they were
    with pytest.raises(ValueError, match="no confidence head to calibrate"):
        calibrate(target, make_drafter(), prompts)
    with pytest.raises(ValueError, match="corrector path.*nothing to calibrate; take a drafter without"):
        calibrate(target, make_drafter(corrector={"name": "path"}, confidence={}), prompts)


# ---- training, on a language whose law is known ----


A, C, WORD = 1, 3, {1: 2, 3: 4}


def bigrams(rows: int, seed: int) -> TrainingBatch:
    """Texts of "1 2" and "3 4" at random, with the law of what follows (as logits of 6 tokens) for last_hidden."""
    firsts = torch.tensor([A, C])[torch.randint(2, (rows, 8), generator=torch.Generator().manual_seed(seed))]
    ids = torch.stack((firsts, firsts + 1), -1).flatten(1)
    law = torch.full((6, 6), -30.0)
    for first, second in WORD.items():
        law[first, second] = 0
        law[second, [A, C]] = math.log(0.5)
    ones = torch.ones_like(ids)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return TrainingBatch(ids, ones, positions, ones.bool(), torch.zeros(*ids.shape, 64), law[ids])


@pytest.fixture(scope="module")
def tiny_view():
    return TargetView(make_target(vocab_size=6))


def learn(view, loss: DraftLoss, steps: int = 120, drafter=None, train=(), **fields):  # noqa: F811
    """A drafter of its own embedding and head after some steps on the toy language, and the loss on unseen texts."""
    if drafter is None:
        sizes = dict(vocab_size=6, mask_token_id=0, draft_vocab_size=None, own_embeddings=True, own_head=True)
        torch.manual_seed(0)
        drafter = BlockDrafter(BlockConfig.tiny(**sizes, **fields))
    drafter.requires_grad_(not train)
    for name in train:
        drafter.get_submodule(name).requires_grad_(True)
    learning = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=1e-2)

    def of(batch):
        return loss(drafter, view, batch, lambda states, ids: states, anchors=None)

    for step in range(steps):
        loss.progress = step / steps
        optimizer.zero_grad()
        of(bigrams(8, step))["loss"].backward()
        optimizer.step()
    drafter.eval()
    with torch.no_grad():
        batch = bigrams(32, 10_000)
        out = of(batch)
    # Between two words: the first slot is a toss, the second its word's end. Inside one: the first is certain.
    between = batch.input_ids.flatten()[out["anchors"]] % 2 == 0
    long = out["anchors"] % batch.input_ids.shape[1] < batch.input_ids.shape[1] - 3
    out["between"], out["inside"] = (
        out["matches"][where & long].float().mean(0).tolist() for where in (between, ~between)
    )
    return drafter, out


DOMINO = {"ce": {"weight": [0, 1, 1.0]}, "base_ce": {"weight": [1, 0, 1.0]}}
DSPARK = {"ce": 0.1, "tv": 1.8, "confidence": 1.0}


@both_conventions
def test_domino_learns_what_a_block_cannot(anchor_drafts, tiny_view):
    """Domino's check 3, trained jointly with its curriculum; DSpark's check 4: where one slot is certain, both slot
    conventions say it, with and without a head."""
    plain, alone = learn(tiny_view, DraftLoss("ce"), anchor_drafts=anchor_drafts)
    fields = dict(corrector={"name": "gru", "rank": 8, "hidden_size": 8}, anchor_drafts=anchor_drafts)
    _, joint = learn(tiny_view, DraftLoss(DOMINO), **fields)
    assert alone["inside"][0] == joint["inside"][0] == 1
    assert 0.3 < alone["between"][1] < 0.7 and joint["between"][1] > 0.98
    if anchor_drafts:
        return
    # The head alone, on the trained block.
    grown = plain.grown(corrector=fields["corrector"])
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    grown, later = learn(tiny_view, DraftLoss("ce"), 80, grown, ["corrector"])
    assert later["between"][1] > 0.98 and later["inside"][0] == 1
    assert all(torch.equal(grown.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", ["vanilla", pytest.param("gated", marks=pytest.mark.slow), "rnn"])
def test_dspark_learns_what_a_block_cannot(kind, tiny_view):
    loss = DraftLoss(DSPARK, {"decay": {"gamma": 4}}, teacher_metrics=True)
    head = {"name": "markov", "rank": 8, "kind": kind}
    drafter, out = learn(tiny_view, loss, corrector=head, confidence={"with_markov": True}, anchor_drafts=True)
    assert out["between"][1] > 0.98 and out["inside"][0] == 1
    accepted = out["slot_acceptance"] / out["slot_count"]
    assert accepted.min() > 0.95 and set(out["terms"]) == {"ce", "tv", "confidence"}


def test_a_trained_confidence_ranks_accepted_above_rejected(tiny_view):
    """DSpark's check 3, on the plain block, which is often wrong: AUC and calibration against drawn acceptances."""
    loss = DraftLoss({"ce": 1.0, "confidence": 1.0})
    drafter, _ = learn(tiny_view, loss, 150, confidence={}, anchor_drafts=True)
    batch = bigrams(64, 20_000)
    with torch.no_grad():
        unrolled = drafter.unroll(tiny_view, batch, anchors=None)
        chance = drafter.confidence(drafter, tiny_view, unrolled.hidden, None).sigmoid()[unrolled.mask]
        teacher = batch.last_hidden.flatten(0, 1)[unrolled.rows]
        exact = acceptance(drafter.logits(tiny_view, unrolled.hidden), teacher)[unrolled.mask]
    accepted = torch.rand(exact.shape, generator=torch.Generator().manual_seed(0)) < exact
    yes, no = chance[accepted], chance[~accepted]
    auc = (yes[:, None] > no).float().mean() + (yes[:, None] == no).float().mean() / 2
    assert auc > 0.7 and expected_calibration_error(chance, accepted) < 0.1
    with pytest.raises(ValueError, match="no part that gives the term confidence"):
        learn(tiny_view, DraftLoss({"ce": 1.0, "confidence": 1.0}), 1)
