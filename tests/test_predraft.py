"""The pre-draft estimator: its likelihood, what it learns, and what it tells in a call."""

import pytest
import torch
from conftest import tiny_llama

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.block.predraft import FADING, History, PreDraft, lately, survival_loss
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import TrainingBatch


def drafter(**fields) -> BlockDrafter:
    torch.manual_seed(1)
    return BlockDrafter(BlockConfig.tiny(predraft={"hidden": 16}, **fields)).eval()


def test_censored_likelihood_recovers_a_geometric_chance():
    """Within 1 %; a loss that takes the end of a draft for a failure comes out low."""
    generator = torch.Generator().manual_seed(0)
    alpha, count, slots = 0.8, 60_000, 8
    offered = torch.randint(1, slots + 1, (count,), generator=generator)
    survived = (torch.rand(count, slots, generator=generator) < alpha).long().cumprod(1).sum(1)
    accepted = torch.minimum(survived, offered)

    def fitted(offered):
        logit = torch.zeros((), requires_grad=True)
        optimizer = torch.optim.LBFGS([logit])

        def closure():
            optimizer.zero_grad()
            loss = survival_loss(logit.expand(count, slots), accepted, offered).sum() / count
            loss.backward()
            return loss

        optimizer.step(closure)
        return float(logit.sigmoid())

    assert fitted(offered) == pytest.approx(alpha, rel=0.01)
    assert fitted(torch.full_like(offered, slots)) < 0.95 * alpha


def test_the_loss_is_the_probability_of_what_happened():
    logits = torch.tensor([[0.3, -0.2, 1.1]]).expand(5, 3)
    chance = logits[0].sigmoid()
    accepted, offered = torch.tensor([0, 1, 3, 2, 0]), torch.tensor([3, 3, 3, 2, 0])
    expected = [1 - chance[0], chance[0] * (1 - chance[1]), chance.prod(), chance[0] * chance[1], 1.0]
    loss = survival_loss(logits, accepted, offered)
    assert (-loss.sum(1)).exp().tolist() == pytest.approx([float(x) for x in expected])
    assert loss[0, 1:].eq(0).all() and loss[1, 2] == 0


def test_the_recent_length_is_the_same_in_training_and_in_a_call():
    """Three rounds, one after another: each ends where the next begins."""
    accepted = torch.tensor([3, 0, 2, 1])
    position = torch.tensor([5, 9, 10, 13])
    document = torch.tensor([0, 0, 0, 0])
    history, told = History(2), []
    for length in accepted.tolist():
        told.append(history.recent[0])
        history.drafted = [4, 0]
        history.hear([length + 1, 1])
    assert lately(accepted, position, document).tolist() == pytest.approx(told)
    assert history.recent[1] == 0
    assert told[2] == pytest.approx(3 * FADING / (FADING + 1 + 0.5))
    # Nothing of other documents, nor of drafts whose end is not known yet.
    assert lately(accepted[:2], torch.tensor([5, 8]), document[:2]).tolist() == [0, 0]
    assert lately(accepted[:2], position[:2], torch.tensor([0, 1])).tolist() == [0, 0]
    history.keep([1])
    assert history.recent == [0] and history.drafted == [0]


def test_training_learns_what_tells_and_nothing_else_moves():
    """Texts whose token tells whether the next is the drafter's: better than any constant on held-out texts."""
    torch.manual_seed(0)
    part = PreDraft(BlockConfig.tiny(), hidden=16)
    good = torch.rand(3000) < 0.5
    fused = torch.randn(3000, 32) + torch.where(good, 1.0, -1.0)[:, None] * torch.ones(32)
    fused[:, ::2] -= fused[:, ::2].mean(1, keepdim=True)  # the mean itself is normed away
    chance = torch.where(good, 0.9, 0.2)
    accepted = (torch.rand(3000, 3) < chance[:, None]).long().cumprod(1).sum(1)
    offered = torch.full((3000,), 3)
    zero = torch.zeros(3000)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    fit, held = slice(0, 2000), slice(2000, 3000)
    for _ in range(60):
        optimizer.zero_grad()
        survival_loss(part(fused[fit], zero[fit], zero[fit]), accepted[fit], offered[fit]).mean().backward()
        optimizer.step()
    reached = torch.stack([(accepted[fit] >= n).float().mean() for n in range(4)])
    constant = torch.logit(reached[1:] / reached[:-1]).expand(1000, 3)
    with torch.no_grad():
        told = survival_loss(part(fused[held], zero[held], zero[held]), accepted[held], offered[held]).mean()
    assert told < 0.85 * survival_loss(constant, accepted[held], offered[held]).mean()


def text(model, length: int = 20) -> TrainingBatch:
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(3))
    documents = torch.ones_like(ids)
    documents[1, 12:] = 2
    positions = torch.arange(length).repeat(2, 1)
    positions[1, 12:] -= 12
    return TrainingBatch(ids, documents, positions, torch.ones_like(ids, dtype=torch.bool))


def test_the_term_is_the_likelihood_of_how_far_drafts_agree_with_the_text():
    model, one = tiny_llama(), drafter()
    view, batch = TargetView(model), text(model)
    with torch.no_grad():
        states = model(batch.input_ids, output_hidden_states=True).hidden_states
    batch.features = torch.cat([states[layer + 1] for layer in one.feature_layers], dim=-1)
    unrolled = one.unroll(view, batch, anchors=None)
    scored = one.score(view, unrolled)
    # Texts on which the drafter is right in its first slots, somewhere.
    labels = scored.logits.argmax(-1)
    labels[::3, 1:], labels[1::3, 2:] = -1, -1
    term = scored.terms["survival"](None, labels, unrolled.mask)
    accepted = ((labels >= 0) & unrolled.mask).long().cumprod(1).sum(1)
    assert len(accepted.unique()) > 2
    positions = batch.position_ids.flatten()[unrolled.anchors]
    for i in (0, 4, 9):
        row, column = divmod(int(unrolled.anchors[i]), 20)
        position = int(batch.position_ids[row, column])
        fused = one.fused(batch.features[row, column - 1])[None] if position else torch.zeros(1, 32)
        recent = lately(accepted, positions, unrolled.anchors - positions)[i : i + 1]
        logits = one.predraft(fused, recent, torch.tensor([position]))
        mine = survival_loss(logits, accepted[i : i + 1], unrolled.mask[i].sum()[None])[0]
        assert torch.allclose(term[i], mine, atol=1e-5)
    result = DraftLoss("survival")(one, view, batch, anchors=None)
    result["loss"].backward()
    learns = {name.split(".")[0] for name, p in one.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learns == {"predraft"}


def test_outlook_reads_the_newest_row_and_takes_nothing():
    model, one = tiny_llama(), drafter()
    view = TargetView(model)
    session, other = one.start(view, 2), one.start(view, 2)
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 64)
    pieces = [Features(hidden, [5, 3], [0, 0]), Features(torch.randn(2, 2, 64), [2, 0], [5, 3])]
    for s in (session, other):
        s.observe(Commit([[1] * 6, [1] * 4], pieces[0]))
        s.observe(Commit([[1] * 2, []], pieces[1]))
    told = session.outlook()
    newest = torch.stack((pieces[1].hidden[0, 1], hidden[1, 2]))
    expected = one.predraft.survival(one.fused(newest), torch.zeros(2), torch.tensor([7, 3]))
    assert torch.allclose(told, expected, atol=1e-6)
    assert told.shape == (2, one.config.num_drafts) and bool((told.diff(dim=1) <= 0).all())
    context = Context(torch.tensor([4, 5]), [7, 3], [3, 3], 3)
    assert torch.equal(session.propose(context).tokens, other.propose(context).tokens)


def test_a_drafter_grows_the_part_and_keeps_its_drafts(tmp_path):
    torch.manual_seed(1)
    plain = BlockDrafter(BlockConfig.tiny()).eval()
    grown = plain.grown(predraft={"hidden": 16}).eval()
    assert {n for n in grown.state_dict() if n not in plain.state_dict()} == {
        f"predraft.{layer}.{kind}" for layer in ("norm", "fc1", "fc2") for kind in ("weight", "bias")
    }
    grown.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), grown.state_dict().values()))
    assert plain.start(TargetView(tiny_llama()), 1).outlook() is None


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="predraft has no option width; it has hidden"):
        BlockDrafter(BlockConfig.tiny(predraft={"width": 8}))
