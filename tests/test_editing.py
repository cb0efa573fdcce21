"""Editors: drafts that are read again, the gate between passes, their training, and the law of what is drawn."""

import math
from dataclasses import replace
from functools import cache
from itertools import permutations, product

import pytest
import torch
import yaml
from conftest import tiny_llama
from targets import LENGTHS, plain
from test_cli import call
from test_lossless import assert_equals_plain
from test_lossless import target as lossless_target
from test_train_cli import config as recipe  # noqa: F401
from test_train_cli import place  # noqa: F401
from test_unroll_block import (
    BORROWS,
    LONG,
    OTHER,
    SHORT,
    decoded_and_simulated,
    greedy_batch,
    make_drafter,
    make_target,
    pack,
)
from torch.nn import functional as F

from hf_specdraft import AutoDrafter, BlockConfig, BlockDrafter
from hf_specdraft.draft import Commit, Context, Draft, Features
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.drafters.block import BlockSession
from hf_specdraft.drafters.block.editing import CavityGate, calibrated_shift, cavity_log_prob, self_evidence
from hf_specdraft.drafters.block.unroll_block import Blocks, Reading
from hf_specdraft.drafters.block.unroll_edit import refined, reread, said
from hf_specdraft.evaluation.edits import EditStatistics, calibrate_cavity, edit_statistics
from hf_specdraft.training.anchors import choose_anchors
from hf_specdraft.training.config import TrainConfig
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import TrainingBatch


@pytest.fixture(scope="module")
def view():
    return TargetView(make_target())


def reading_of(drafter, view, batch) -> Reading:
    return Reading(drafter, view, batch, Blocks.of(batch, choose_anchors(batch), drafter.config.block_size))


# ---- decoding ----

GATE = dict(edit_passes=3, edit_gate={"name": "cavity", "slot_gamma": 2.0, "accept_unscored": False})


@pytest.mark.parametrize(
    "fields",
    [
        dict(edit_passes=1),
        dict(edit_passes=2, anchor_drafts=True),
        dict(edit_passes=2, edit_early_exit=False, edit_type_embedding=True),
        dict(edit_passes=2, tree_nodes=6),
        dict(edit_passes=1, corrector={"name": "markov", "rank": 4}),
        GATE,
        dict(GATE, anchor_drafts=True, tree_nodes=6),
    ],
    ids=lambda fields: "-".join(fields),
)
def test_greedy_output_is_plain_generates(fields):
    torch.manual_seed(1)
    drafter = BlockDrafter(BlockConfig.tiny(policy="fixed", initializer_range=0.3, **fields)).eval()
    passes = []
    drafter.norm.register_forward_hook(lambda module, inputs, output: passes.append(output.shape[0]))
    stats = assert_equals_plain(lossless_target("llama", "sdpa"), plain("llama", "sdpa", LENGTHS), drafter)
    assert stats.verified > 0 and len(passes) > max(stats.rounds)


def test_one_pass_is_the_plain_drafter(view):
    """dedit.md, check 1: bit for bit, in training and with the mark of drafted tokens."""
    plain_drafter = make_drafter()
    editor = plain_drafter.grown(edit_passes=2, edit_type_embedding=True)
    editor.edit_embedding.weight.data.normal_()
    batch = pack([[SHORT, LONG], [OTHER]])
    want = plain_drafter.unroll(view, batch, anchors=None)
    for out in (editor.eval().unroll(view, batch, mode="plain"), editor.train().unroll(view, batch)):
        assert torch.equal(out.hidden[: len(want.hidden)], want.hidden)
    assert len(out.hidden) >= 2 * len(want.hidden)


@pytest.mark.parametrize("anchor_drafts", [False, True])
def test_a_pass_reads_each_token_in_its_own_place(anchor_drafts, monkeypatch, view):
    """Both slot conventions: token j from the anchor stands in slot j."""
    drafter = make_drafter(anchor_drafts=anchor_drafts, edit_passes=2, edit_early_exit=False, policy="fixed")
    asked, block_pass = [], BlockSession.block_pass

    def spy(session, context, slots, ids=None):
        block = block_pass(session, context, slots, ids)
        asked.append((None if ids is None else ids.tolist(), slots, block.ids[block.logits.argmax(-1)].tolist()))
        return block

    monkeypatch.setattr(BlockSession, "block_pass", spy)
    make_target().generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    (first, second, third) = asked[:3]
    slots = drafter.config.num_drafts
    assert first[0] is None and len(first[2][0]) == slots == 3 + anchor_drafts
    for before, after in ((first, second), (second, third)):
        assert after[0][0][1:] == before[2][0][:3]
    # Two tokens are wanted: the last pass says no more, but the whole block was edited.
    assert len(second[2][0]) == slots and len(third[2][0]) == 2


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("anchor_drafts", [False, True])
def test_the_draft_is_the_last_passs_word_or_the_one_its_gate_keeps(anchor_drafts, gated, view):
    """Tokens, logits and law, of passes over the same context."""
    gate = {"name": "cavity", "accept_unscored": False} if gated else None
    fields = dict(anchor_drafts=anchor_drafts, draft_vocab_size=None, edit_passes=2, edit_early_exit=False)
    drafter, rows = make_drafter(**fields, edit_gate=gate), 12
    session, depth, size = drafter.start(view, rows), drafter.config.num_drafts, drafter.config.block_size
    session.observe(
        Commit([[1]] * rows, Features(torch.randn(rows, 6, drafter.fc.in_features), [6] * rows, [0] * rows))
    )
    context = Context(torch.arange(rows), [6] * rows, [depth] * rows, depth)
    draft, drawn = session.propose(context), session.propose(replace(context, do_sample=True))
    slots, ids, logits = slice(drafter.config.first_slot, drafter.config.first_slot + depth), None, []
    for _ in range(3):
        logits.append(session.block_pass(context, slots, ids).logits)
        ids = torch.cat((context.anchor[:, None], logits[-1].argmax(-1)), 1)[:, :size]
    logits = torch.stack(logits)
    tokens = logits.argmax(-1)
    assert (tokens[0] != tokens[1]).any() and (tokens[1] != tokens[2]).any()
    number = torch.full((rows,), 2)
    if gated:
        first, second = (drafter.config.gate.energy(logits[n + 1], tokens[n], size - 1) for n in (0, 1))
        number = (second < first).long()
        assert 0 < number.sum() < rows
    kept = logits[number, torch.arange(rows)]
    assert torch.equal(draft.tokens, kept.argmax(-1))
    torch.testing.assert_close(draft.evidence.logits, kept)
    assert (drawn.law is None) == gated
    if not gated:
        torch.testing.assert_close(drawn.law.probs, kept.softmax(-1))


def test_drafts_of_several_passes_do_not_depend_on_the_batch_or_on_early_exit():
    target, rows = lossless_target("llama", "sdpa"), plain("llama", "sdpa", LENGTHS)
    torch.manual_seed(1)
    drafter = BlockDrafter(BlockConfig.tiny(policy="fixed", edit_passes=3)).eval()
    together = assert_equals_plain(target, rows, drafter)
    alone = [assert_equals_plain(target, [row], drafter) for row in rows]
    assert together.rounds == [stats.rounds[0] for stats in alone]
    drafter.config.edit_early_exit = False
    assert assert_equals_plain(target, rows, drafter).rounds == together.rounds


# ---- the law of what is drawn ----


class Peeking(BlockSession):
    """Forbidden: draws from the last pass's law, keeps a drawn 0 but draws again over a 1, and tells the law."""

    def _marginal(self, block, context, lengths):
        tokens, law = self.drafter.draw(self.view, block.logits, context)
        again, _ = self.drafter.draw(self.view, block.logits, context)
        return Draft.chain(torch.where(tokens == 0, tokens, again), lengths, law=law)


@cache
def two_tokens():
    target = tiny_llama(vocab=2, seed=3)
    prefixes, law = torch.tensor([[1, 1, 1]]), torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        with torch.no_grad():
            probs = (target(prefixes).logits[:, -1].double() / 3).softmax(-1)
        law = (law[:, None] * probs).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(2, 0), torch.tensor([0, 1]).repeat(len(prefixes))[:, None]], 1)
    return target, law


def deviation(session=BlockSession, rows: int = 6000, **fields) -> float:
    """Of the histogram of three tokens, in standard errors: the largest of the eight texts."""
    target, law = two_tokens()
    torch.manual_seed(4)
    config = BlockConfig.tiny(
        vocab_size=3, mask_token_id=2, draft_vocab_size=None, policy="fixed", initializer_range=0.3, **fields
    )
    drafter = BlockDrafter(config).eval()
    drafter.start = lambda view, batch: session(drafter, view, batch)
    ids = torch.tensor([[1, 1, 1]]).expand(rows, 3)
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        do_sample=True,
        temperature=3.0,
        top_k=0,
        max_new_tokens=4,
        min_new_tokens=4,
    )
    cells = (out[:, 3:6] * torch.tensor([4, 2, 1])).sum(1)
    counts = torch.bincount(cells, minlength=8).double()
    return ((counts - rows * law).abs() / (rows * law * (1 - law)).sqrt()).max().item()


@pytest.mark.parametrize(
    "fields",
    [
        dict(edit_sampling="law"),
        dict(edit_sampling="argmax"),
        dict(edit_gate="cavity"),
        dict(corrector={"name": "markov", "rank": 2}),
    ],
    ids=str,
)
def test_sampled_output_has_the_targets_law(fields):
    assert deviation(edit_passes=2, **fields) < 3


def test_editing_what_was_drawn_is_caught():
    assert deviation(Peeking, edit_passes=2) > 5


# ---- the cavity energy ----


def posterior(joint, observed, rate):
    """[L, V] exact posteriors of the tokens of a joint law [V, ...] given observations [L] of all of them."""
    size, length = joint.shape[0], joint.dim()
    weights = joint.clone()
    for i, a in enumerate(observed):
        likelihood = torch.full((size,), rate / size, dtype=torch.float64)
        likelihood[a] += 1 - rate
        weights = weights * likelihood.view([-1 if j == i else 1 for j in range(length)])
    laws = [weights.sum([j for j in range(length) if j != i]) for i in range(length)]
    return torch.stack([law / law.sum() for law in laws])


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_the_formula_is_the_exact_posterior_given_the_others(rate):
    """drlm.md, check 1: two correlated tokens of three."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    joint /= joint.sum()
    likelihood = torch.full((3, 3), rate / 3, dtype=torch.float64) + (1 - rate) * torch.eye(3, dtype=torch.float64)
    for observed in product(range(3), repeat=2):
        laws, tokens = posterior(joint, observed, rate), torch.tensor(observed)
        got = cavity_log_prob(laws.log(), tokens, self_evidence(rate, 3)).exp()
        # Token 0 given what was seen of token 1 only, and the other way round.
        cavities = joint @ likelihood[:, observed[1]], joint.T @ likelihood[:, observed[0]]
        want = torch.stack([law[a] / law.sum() for law, a in zip(cavities, observed)])
        assert (got - want).abs().max() < 1e-12


def test_limits_of_the_rate():
    """drlm.md, check 2."""
    logits, tokens = torch.randn(5, 50_000, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    assert self_evidence(1.0, 50_000) == 0
    plain_log_prob = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(cavity_log_prob(logits, tokens, 0.0), plain_log_prob)
    assert (cavity_log_prob(logits, tokens, self_evidence(1e-300, 50_000)) < -600).all()
    sure = torch.full((1, 9), -math.inf)
    sure[0, 4] = 0.0
    for shift in (0.0, self_evidence(1e-300, 9)):
        assert cavity_log_prob(sure, torch.tensor([4]), shift).item() == 0
        assert cavity_log_prob(sure, torch.tensor([3]), shift).item() == -math.inf
    # Where P rounds to 1 the odds are still told apart.
    sharp = torch.tensor([[40.0, 0.0, 0.0], [60.0, 0.0, 0.0]])
    assert torch.equal(sharp.softmax(-1)[:, 0], torch.ones(2))
    odds = cavity_log_prob(sharp, torch.zeros(2, dtype=torch.long), 55.0)
    torch.testing.assert_close(odds, F.logsigmoid(torch.tensor([-15.0, 5.0]) - math.log(2)))
    assert cavity_log_prob(sharp.bfloat16(), torch.zeros(2, dtype=torch.long), 55.0).dtype == torch.float32


def sudokus() -> torch.Tensor:
    """[288, 16] all 4x4 grids, digits from 0."""
    rows = list(permutations(range(4)))
    apart = lambda a, b: all(x != y for x, y in zip(a, b))  # noqa: E731
    boxed = lambda a, b: {*a[:2], *b[:2]} == {0, 1, 2, 3} == {*a[2:], *b[2:]}  # noqa: E731
    pairs = [(a, b) for a, b in product(rows, rows) if apart(a, b) and boxed(a, b)]
    grids = [a + b + c + d for (a, b), (c, d) in product(pairs, pairs) if all(map(apart, (a, a, b, b), (c, d, c, d)))]
    return torch.tensor(grids)


def test_energy_falls_when_a_duplicated_digit_is_mended():
    """drlm.md, check 3, by the exact denoiser, the posterior over all grids. Raw confidence takes some grids of two
    wrong digits for better than with one of them mended."""
    grids, rate = sudokus(), 0.3
    assert len(grids) == 288

    def laws(x):
        """[N, 16, 4] of grids [N, 16]."""
        weights = torch.where(x[:, None] == grids, 1 - rate + rate / 4, rate / 4).double().prod(-1)
        return torch.einsum("ng,gid->nid", weights / weights.sum(1, keepdim=True), F.one_hot(grids, 4).double())

    def changed(x, cell, by):
        x = x.clone()
        x[cell] = (x[cell] + by) % 4
        return x

    right, cells = grids[0], range(16)
    once = [changed(right, cell, 1) for cell in cells]
    cavity = cavity_log_prob(laws(torch.stack(once)).log(), torch.stack(once), self_evidence(rate, 4))
    assert cavity.argmin(1).tolist() == [*cells]  # no cell looks worse than the wrong one
    pairs = [(wrong, right) for wrong in once]
    for a, b in permutations(cells, 2):
        for by in product((1, 2, 3), repeat=2):
            mended = changed(right, a, by[0])
            pairs.append((changed(mended, b, by[1]), mended))
    wrong, mended = map(torch.stack, zip(*pairs))
    before, after = laws(wrong).log(), laws(mended).log()
    gate, raw = CavityGate(rate=rate), CavityGate(rate=1.0)  # of tokens that gave no evidence for themselves
    assert (gate.energy(after, mended, 16) < gate.energy(before, wrong, 16)).all()
    misled = raw.energy(after, mended, 16) > raw.energy(before, wrong, 16)
    assert misled.sum() > 50


def test_the_energy_weighs_its_slots_and_corrects_those_that_were_read():
    """Three slots, the last of which never stood in the block."""
    logits, tokens = torch.randn(2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]])
    odds, rate = (logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]).logit(), 0.2
    for shift in (None, [1.0, -2.0, 3.0]):
        gate = CavityGate(rate=rate, slot_gamma=2.0, shift=shift)
        told = torch.tensor([*(shift or [self_evidence(rate, 5)] * 3)[:2], 0.0])
        want = -(torch.tensor([1.0, math.exp(-0.5), math.exp(-1)]) * F.logsigmoid(odds - told)).sum(1)
        torch.testing.assert_close(gate.energy(logits, tokens, 2), want)


@pytest.mark.parametrize(("passes", "accept_unscored"), [(5, False), (3, True)])
def test_accepted_rounds_lower_the_energy(passes, accept_unscored, view):
    """drlm.md, check 4: by every pass's energies, the gate keeps the draft of the lowest, of those up to the first that
    does not fall; or the last pass's, which none has read, where all fell."""
    gate = {"name": "cavity", "slot_gamma": 3.0, "accept_unscored": accept_unscored}
    drafter = make_drafter(block_size=8, edit_passes=passes, edit_gate=gate)
    reading = reading_of(drafter, view, pack([[SHORT, LONG], [OTHER]]))
    with torch.no_grad():
        kept = refined(reading).best
        best, energies = [said(reading, reading.states(reading.masked()))[0]], []
        for _ in range(passes):
            now, _, energy = said(reading, reread(reading, drafter.target_ids(best[-1])), best[-1])
            best.append(now)
            energies.append(energy)
    energies, drafts, stops = torch.stack(energies), torch.stack(best), []
    for row in range(len(kept)):
        n = 1
        while n < passes and energies[n, row] < energies[n - 1, row] and (drafts[n, row] != drafts[n - 1, row]).any():
            n += 1
        stops.append(n)
        assert torch.equal(kept[row], drafts[n if n == passes and accept_unscored else n - 1, row])
    assert len(set(stops)) > 1 and (max(stops) == passes or not accept_unscored)


def test_calibration_expects_as_many_right_as_there_are():
    generator = torch.Generator().manual_seed(0)
    odds, mask = 5 * torch.randn(4000, 3, generator=generator) + 8, torch.rand(4000, 3, generator=generator) < 0.8
    correct = torch.rand(4000, 3, generator=generator) < (odds - torch.tensor([3.0, 8.0, 10.0])).sigmoid()
    shift = calibrated_shift(odds, correct, mask)
    torch.testing.assert_close(torch.tensor(shift), torch.tensor([3.0, 8.0, 10.0]), atol=0.3, rtol=0)
    expected = ((odds - torch.tensor(shift)).sigmoid() * mask).sum(0)
    torch.testing.assert_close(expected, (correct & mask).sum(0).float(), atol=0.5, rtol=0)


# ---- training ----


def test_the_mixtures_are_what_they_are_called(view, monkeypatch):
    batch = pack([[SHORT, LONG], [OTHER]])
    drafter = make_drafter(draft_vocab_size=None).train()
    fed, states = [], Reading.states
    monkeypatch.setattr(Reading, "states", lambda self, ids: fed.append(ids[self.blocks.real]) or states(self, ids))

    def mixed(**options):
        fed.clear()
        out = drafter.unroll(view, batch, anchors=None, mode={"name": "edit", "third": 0.0, **options})
        count = len(out.hidden) // 2
        labels, mask = out.labels[:count], out.mask[:count]
        logits = drafter.logits(view, out.hidden[:count])
        assert torch.equal(fed[1][:, 0], fed[0][:, 0])
        return fed[1][:, 1:], logits.argmax(-1), logits.softmax(-1).amax(-1), labels, mask

    tokens, drafts, *_ = mixed(mix="all_draft")
    assert torch.equal(tokens, drafts)
    tokens, drafts, _, labels, mask = mixed(mix="all_gold")
    assert torch.equal(tokens, labels.where(mask, drafts))
    kept = {}
    for mix in ("keep_confident", "keep_uncertain", "uniform"):
        shares = []
        for _ in range(25):
            tokens, drafts, confidence, labels, mask = mixed(mix=mix, rho=0.25)
            told = mask & (drafts != labels)
            assert ((tokens == drafts) | (tokens == labels))[mask].all()
            shares.append((tokens == drafts)[told].float())
        kept[mix] = torch.stack(shares).mean(0)
    chance = confidence[told]
    assert chance.std() > 0.05
    for mix, want in (("keep_confident", chance), ("keep_uncertain", 1 - chance), ("uniform", chance * 0 + 0.25)):
        z = (kept[mix] - want) / (want * (1 - want) / 25).sqrt()
        assert z.abs().max() < 5 and z.mean().abs() < 1
    tokens, drafts, *_ = mixed(mix="all_draft", corruption=1.0)
    assert (tokens != drafts).float().mean() > 0.9 and tokens.max() < 64


def test_all_passes_of_an_anchor_are_taught_and_metrics_are_of_the_first(view):
    batch = pack([[SHORT, LONG], [OTHER]])
    drafter = make_drafter().train()
    plain_unroll = drafter.unroll(view, batch, anchors=None)
    count = len(plain_unroll.hidden)
    out = drafter.unroll(view, batch, anchors=None, mode={"name": "edit", "third": 1.0, "weight": 0.5})
    assert len(out.hidden) == 3 * count
    assert torch.equal(out.labels, plain_unroll.labels.repeat(3, 1)) and torch.equal(
        out.previous, plain_unroll.previous.repeat(3, 1)
    )
    assert out.weight.tolist() == [1.0] * count + [0.5] * 2 * count
    assert out.drafts.tolist() == [True] * count + [False] * 2 * count
    # The third pass reads the best tokens of the second.
    with torch.no_grad():
        reading = reading_of(drafter, view, batch)
        reading.states(reading.masked())
        second = said(reading, out.hidden[count : 2 * count])[0]
        torch.testing.assert_close(reread(reading, drafter.target_ids(second)), out.hidden[2 * count :])
    metrics = DraftLoss("ce")(drafter, view, batch, anchors=None, mode={"name": "edit", "weight": 0.5})
    assert metrics["matches"].shape == plain_unroll.mask.shape


def test_edit_passes_send_gradients_into_the_context_once(view):
    drafter, shapes = make_drafter().train(), []
    drafter.fc.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    batch = pack([[SHORT, LONG], [OTHER]])
    batch.features.requires_grad_()
    out = drafter.unroll(view, batch, anchors=None, mode={"name": "edit", "third": 1.0})
    assert shapes == [(2, 30, 32)]
    gradients = []
    for part in out.hidden.chunk(3):
        (gradient,) = torch.autograd.grad(part.square().sum(), batch.features, retain_graph=True)
        gradients.append(gradient)
        assert gradient[0].abs().sum() > 0
    assert not torch.allclose(gradients[0], gradients[1])


def learn(drafter, view, batches, steps: int, lr: float = 5e-3, **unroll) -> None:
    optimizer, loss = torch.optim.Adam(drafter.parameters(), lr=lr), DraftLoss("ce")
    drafter.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss(drafter, view, batches[step % len(batches)], anchors=None, **unroll)["loss"].backward()
        optimizer.step()
    drafter.eval()


@pytest.mark.parametrize("anchor_drafts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_simulated_tau_is_that_of_decoding(anchor_drafts):
    target, prompt = make_target(), 4
    fields = dict(anchor_drafts=anchor_drafts, sliding_window=32, edit_passes=2, **BORROWS)
    drafter = make_drafter(**fields)
    batch = greedy_batch(target, drafter, prompt, 64)
    taus = []
    for steps in (0, 30):
        learn(drafter, TargetView(target), [batch], steps, lr=3e-3, mode={"name": "edit", "third": 0.0})
        decoded, simulated = decoded_and_simulated(target, drafter, batch, prompt)
        print(f"tau decoded {decoded:.3f}, simulated {simulated:.3f}")
        assert simulated == pytest.approx(decoded, rel=0.05)
        taus.append(decoded)
    assert taus[-1] > taus[0]


def test_a_recipe_makes_an_editor_of_a_plain_drafter(recipe, tmp_path):  # noqa: F811
    values = yaml.safe_load(recipe.read_text())
    values["trainer"].update(max_steps=2, eval_steps=2)
    recipe.write_text(yaml.safe_dump(values))
    call("train", recipe)
    values["drafter"] = {"init_from": str(tmp_path / "out"), "edit_passes": 2}
    values["unroll"] = {"anchors": 4, "mode": {"name": "edit", "mix": "keep_uncertain", "corruption": 0.2}}
    values["trainer"]["output_dir"] = str(tmp_path / "editor")
    recipe.write_text(yaml.safe_dump(values))
    call("train", recipe)
    editor = AutoDrafter.from_pretrained(tmp_path / "editor")
    assert editor.config.edit_passes == 2
    assert "eval_simulated_tau" in (tmp_path / "editor" / "training_log.json").read_text()
    values["unroll"]["mode"]["mix"] = "all_wrong"
    recipe.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match="unroll.mode.mix must be one of keep_confident"):
        TrainConfig.read(recipe)


# ---- toys: texts of a tiny language, without a target ----

PHASE = 8  # tokens of each of three kinds


def riddles(seed: int, rows: int = 8) -> TrainingBatch:
    """Eight texts of four tokens a row: the second is told by the third, of which the last is a copy, by nothing before
    it."""
    generator = torch.Generator().manual_seed(seed)
    first, last = torch.randint(PHASE, (2, rows, 8), generator=generator)
    second = (3 * last + 1) % PHASE + PHASE
    batch = toy(torch.stack([first, second, last + 2 * PHASE, last + 2 * PHASE], dim=2).flatten(1))
    batch.document_ids = 1 + batch.position_ids // 4
    batch.position_ids = batch.position_ids % 4
    return batch


def walks(seed: int, rows: int = 8, length: int = 24) -> TrainingBatch:
    """Each of 24 tokens has one that follows it, but one in ten is any."""
    generator = torch.Generator().manual_seed(seed)
    follower = torch.randperm(24, generator=torch.Generator().manual_seed(5))
    tokens = [torch.randint(24, (rows,), generator=generator)]
    for _ in range(length - 1):
        strays, stray = torch.rand(rows, generator=generator) < 0.1, torch.randint(24, (rows,), generator=generator)
        tokens.append(torch.where(strays, stray, follower[tokens[-1]]))
    return toy(torch.stack(tokens, 1))


def toy(tokens: torch.Tensor) -> TrainingBatch:
    ones = torch.ones_like(tokens)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    features = torch.zeros(*tokens.shape, 64)
    return TrainingBatch(tokens, ones, positions, ones.bool(), features)


def toy_drafter(size: int, causal: bool = False) -> BlockDrafter:
    torch.manual_seed(0)
    layers = dict(layer_types=["sliding_attention"] * 2, sliding_window=64, sliding_causal=causal)
    return BlockDrafter(
        BlockConfig.tiny(block_size=size, vocab_size=40, mask_token_id=39, draft_vocab_size=24, **layers)
    )


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_only_an_editor_that_looks_ahead_mends_a_token_by_the_next(causal, view):
    """dedit.md, check 3."""
    drafter = toy_drafter(4, causal)
    mode = {"name": "edit", "mix": "all_gold", "corruption": 0.3, "third": 0.0}
    learn(drafter, view, [riddles(i) for i in range(20)], 100, lr=1e-2, mode=mode)
    mended = mended_by(drafter, view)
    print(f"mended {mended:.3f}")
    assert mended < 0.3 if causal else mended > 0.7


@torch.no_grad()
def mended_by(drafter, view) -> float:
    """How often a wrong second token is set right when all behind it are."""
    reading = reading_of(drafter, view, riddles(99, rows=30))
    labels = reading.unrolled(reading.states(reading.masked())).labels
    seconds = labels[:, 0] // PHASE == 1
    fed = labels.clone()
    fed[:, 0] = PHASE + (labels[:, 0] + 3) % PHASE
    return (said(reading, reread(reading, fed))[0][:, 0] == labels[:, 0])[seconds].float().mean().item()


@cache
def walker(mix: str | None) -> BlockDrafter:
    """Half trained on walks, so that drafts have errors to mend; mix None: on masks alone."""
    drafter = toy_drafter(5)
    mode = "plain" if mix is None else {"name": "edit", "mix": mix, "corruption": 0.1}
    learn(drafter, TargetView(make_target()), [walks(i) for i in range(20)], 45, mode=mode)
    return drafter


def edits_of(mix: str | None, view, **fields) -> EditStatistics:
    drafter = walker(mix)
    config = drafter.config
    drafter.config = BlockConfig(**{**config.to_diff_dict(), **fields})
    stats = edit_statistics(drafter, view, [walks(i) for i in range(90, 94)])
    drafter.config = config
    print(mix, fields, stats)
    return stats


def test_a_second_pass_must_be_trained(view):
    """dedit.md, check 2."""
    untrained = edits_of(None, view, edit_passes=1)
    assert untrained.after < 0.5 * untrained.before and untrained.harmful > 2 * untrained.helpful
    trained = edits_of("keep_confident", view, edit_passes=2)
    assert trained.after > 0.99 * trained.before and trained.harmful < 0.01


def test_mixtures_harm_less_than_drafts_alone_and_the_text_alone_teaches_to_copy(view):
    """dedit.md, check 4."""
    drafts_alone = edits_of("all_draft", view, edit_passes=2)
    mixture = edits_of("keep_confident", view, edit_passes=2)
    assert mixture.harmful < 0.5 * drafts_alone.harmful and mixture.after > drafts_alone.after
    copies = edits_of("all_gold", view, edit_passes=2)
    assert copies.edited < 0.02


def test_the_gate_keeps_from_harm(view):
    """drlm.md, check 5, at as many passes."""
    free = edits_of("all_draft", view, edit_passes=3)
    gate = {"name": "cavity", "rate": 0.1, "accept_unscored": False}
    gated = edits_of("all_draft", view, edit_passes=3, edit_gate=gate)
    assert gated.harmful < free.harmful
    shift = calibrate_cavity(walker("all_draft"), view, [walks(80)])
    assert len(shift) == 4 and all(abs(value) < 50 for value in shift)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (dict(edit_passes=-1), "edit_passes must be 0 or more"),
        (dict(edit_sampling="draw"), "edit_sampling must be law or argmax"),
        (dict(edit_passes=1, edit_gate="cavity"), "edit_gate needs edit_passes of 2"),
        (dict(edit_passes=2, edit_gate="energy"), "edit_gate must be cavity"),
        (dict(edit_passes=2, edit_gate={"name": "cavity", "rat": 1}), "no option rat; it has rate, slot_gamma"),
        (dict(edit_passes=2, edit_gate={"name": "cavity", "rate": 0}), "edit_gate.rate is the share"),
        (dict(edit_passes=2, edit_gate={"name": "cavity", "slot_gamma": 0}), "slot_gamma must be above 0"),
        (dict(edit_passes=2, edit_gate={"name": "cavity", "shift": [1.0]}), "shift has 1 values for a block's 3"),
    ],
)
def test_configs_that_make_no_sense_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        BlockConfig.tiny(**fields)


@pytest.mark.parametrize(
    ("mode", "match"),
    [
        ("edits", "unroll.mode must be one of .*edit.*plain"),
        ({"name": "edit", "mixed": 1}, "edit has no option mixed; it has mix, rho"),
        ({"name": "edit", "mix": "draft"}, "mix must be one of keep_confident"),
        ({"name": "edit", "third": 3}, "third is a share"),
        ({"name": "edit", "rho": "much"}, "rho is a share"),
        ({"name": "edit", "weight": -1}, "weight must be a number, 0 or more"),
        ({"name": "plain", "mix": "all_gold"}, "plain has no option mix; it has none"),
    ],
)
def test_unroll_modes_are_checked_before_any_work(mode, match):
    with pytest.raises(ValueError, match=match):
        BlockDrafter.check_unroll({"mode": mode})


def test_an_editor_is_saved_whole(tmp_path):
    gate = {"name": "cavity", "rate": 0.1, "shift": [1.0, 2.0, 3.0]}
    drafter = make_drafter(edit_passes=2, edit_type_embedding=True, edit_gate=gate)
    drafter.edit_embedding.weight.data.normal_()
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert loaded.config.gate == CavityGate(rate=0.1, shift=[1.0, 2.0, 3.0])
    assert torch.equal(loaded.edit_embedding.weight, drafter.edit_embedding.weight)
