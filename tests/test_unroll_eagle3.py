"""EAGLE-3's training-time test: in training every anchor's steps are those that decoding makes, fed the text."""

import pytest
import torch
from targets import padded
from test_eagle3 import FORMS, WIDTH, make_drafter, make_target
from torch.nn import functional as F

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.training.anchors import choose_anchors
from hf_specdraft.training.features import LiveFeatures
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.training.simulation import simulated_tau


@pytest.fixture(scope="module")
def view():
    return TargetView(make_target())


def document(seed: int, length: int, prompt: int):
    """(tokens, loss mask, features) of a random chat of one turn."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, 58, (length,), generator=generator)
    return tokens, torch.arange(length) >= prompt, torch.randn(length, WIDTH, generator=generator)


def pack(rows: list[list[tuple]]) -> TrainingBatch:
    """Rows of documents -> a batch; what stands in padding must not matter, so it is anything."""
    shape = len(rows), max(sum(len(doc[0]) for doc in row) for row in rows)
    batch = TrainingBatch(
        input_ids=torch.full(shape, 7),
        document_ids=torch.zeros(shape, dtype=torch.long),
        position_ids=torch.zeros(shape, dtype=torch.long),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        features=torch.full((*shape, WIDTH), 3.0),
    )
    for b, row in enumerate(rows):
        end = 0
        for number, (tokens, mask, features) in enumerate(row, start=1):
            at = slice(end, end + len(tokens))
            batch.input_ids[b, at], batch.document_ids[b, at] = tokens, number
            batch.position_ids[b, at], batch.loss_mask[b, at] = torch.arange(len(tokens)), mask
            batch.features[b, at] = features
            end += len(tokens)
    return batch


LONG, SHORT, OTHER = document(1, 21, 2), document(2, 9, 4), document(3, 13, 6)


def in_drafting(drafter, view, doc, monkeypatch, steps: int) -> dict[int, torch.Tensor]:
    """By anchor, the states [<= steps, H] that the session's head reads while it is fed the document's tokens."""
    tokens, mask, features = doc
    session = drafter.start(view, 1)
    start = max(1, int(mask.int().argmax()))
    session.observe(Commit([tokens[: start + 1].tolist()], Features(features[None, :start], [start], [0])))
    heard, found = [], {}
    logits = drafter.logits

    def listen(view, hidden):
        heard.append(hidden[0, 0])
        return logits(view, hidden)

    for anchor in range(start, len(tokens) - 1):
        heard.clear()
        gold = tokens[anchor + 1 : anchor + 1 + steps].tolist()
        given = iter(gold)
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "logits", listen)
            patch.setattr(drafter, "target_ids", lambda index, given=given: torch.tensor([[next(given)]]))
            session.propose(Context(tokens[anchor : anchor + 1], [anchor], [len(gold)], len(gold)))
        found[anchor] = torch.stack(heard)
        session.observe(Commit([gold[:1]], Features(features[None, anchor : anchor + 1], [1], [anchor])))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_step_i_in_training_is_step_i_of_drafting(form, view, monkeypatch):
    drafter, steps = make_drafter(form), 4
    with torch.no_grad():
        unrolled = drafter.unroll(view, pack([[SHORT, LONG], [OTHER]]), steps=steps, anchors=None)
        want = [in_drafting(drafter, view, doc, monkeypatch, steps) for doc in (SHORT, LONG, OTHER)]
    want = [states for found in want for states in found.values()]
    assert unrolled.hidden.shape[:2] == (len(want), steps)
    assert unrolled.mask.sum(1).tolist() == [len(states) for states in want]
    for got, mask, states in zip(unrolled.hidden, unrolled.mask, want):
        torch.testing.assert_close(got[mask], states, atol=1e-4, rtol=1e-4)


def test_what_is_learned_is_what_follows(view):
    batch = pack([[SHORT, LONG], [OTHER]])
    unrolled = make_drafter().unroll(view, batch, steps=3, anchors=None)
    flat = batch.input_ids.flatten()
    assert torch.equal(unrolled.anchors, choose_anchors(batch).flatten().nonzero().flatten())
    assert torch.equal(unrolled.rows[:, 0], unrolled.anchors)
    assert torch.equal(flat[unrolled.rows + 1][unrolled.mask], unrolled.labels[unrolled.mask])


def test_an_anchor_needs_a_token_before_it(view):
    """A text without a prompt: no state comes before its first token."""
    first = LONG[0], torch.ones_like(LONG[1]), LONG[2]
    unrolled = make_drafter().unroll(view, pack([[SHORT, first]]), steps=2, anchors=None)
    starts = list(range(4, len(SHORT[0]) - 1)) + list(range(len(SHORT[0]) + 1, len(SHORT[0]) + len(LONG[0]) - 1))
    assert unrolled.anchors.tolist() == starts


def test_anchors_can_be_capped(view):
    drafter, batch = make_drafter(), pack([[SHORT, LONG], [OTHER]])
    with torch.no_grad():
        everything = drafter.unroll(view, batch, anchors=None)
        some = drafter.unroll(view, batch, anchors=3)
    assert len(some.anchors) == 9 and len(some.anchors.unique()) == 9
    place = torch.searchsorted(everything.anchors, some.anchors)
    torch.testing.assert_close(some.hidden, everything.hidden[place], atol=1e-5, rtol=1e-5)


def test_a_batch_without_anchors_is_empty(view):
    doc = LONG[0], torch.zeros_like(LONG[1]), LONG[2]
    drafter = make_drafter()
    unrolled = drafter.unroll(view, pack([[doc]]), steps=2)
    assert unrolled.hidden.shape == (0, 2, 32) and unrolled.labels.shape == (0, 2)
    unrolled.hidden.sum().backward()
    assert not drafter.fc.weight.grad.any()


def test_options_that_cannot_be(view):
    drafter, batch = make_drafter(), pack([[LONG]])
    with pytest.raises(ValueError, match="steps must be at least 1"):
        drafter.unroll(view, batch, steps=0)
    batch.features = None
    with pytest.raises(ValueError, match=r"layers -1, 0"):
        drafter.unroll(view, batch)


def loss_of(drafter, view, batch, steps: int = 4) -> torch.Tensor:
    """Summed cross-entropy with the text's tokens."""
    unrolled = drafter.unroll(view, batch, steps=steps, anchors=None)
    logits = drafter.spread(view, drafter.logits(view, unrolled.hidden), fill=-50.0)
    return F.cross_entropy(logits[unrolled.mask], unrolled.labels[unrolled.mask], reduction="sum")


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_learn_as_they_would_apart(form, view):
    drafter = make_drafter(form)
    losses, gradients = [], []
    for batches in ([[SHORT, LONG, OTHER]],), ([[SHORT], [LONG], [OTHER]],), ([[SHORT]], [[LONG]], [[OTHER]]):
        drafter.zero_grad()
        losses.append(sum(loss_of(drafter, view, pack(rows)) for rows in batches))
        losses[-1].backward()
        gradients.append({name: weight.grad.clone() for name, weight in drafter.named_parameters()})
    for loss, gradient in zip(losses[1:], gradients[1:]):
        torch.testing.assert_close(loss, losses[0], rtol=1e-4, atol=0)
        for name, value in gradient.items():
            torch.testing.assert_close(value, gradients[0][name], rtol=1e-3, atol=1e-3, msg=name)
            assert value.isfinite().all() and value.any(), name


@pytest.mark.parametrize("shift", [0, 1])
def test_a_drafter_that_learned_a_text_drafts_it(shift):
    """Trained on what the target wrote it drafts nearly all of it; with features off by one it must not."""
    target = make_target()
    prompt = torch.randint(1, 64, (1, 8), generator=torch.Generator().manual_seed(5))
    text = target.generate(prompt, max_new_tokens=48, do_sample=False)
    fields = dict(reads_final=True, num_target_layers=4, policy="fixed", num_assistant_tokens=4, own_head=True)
    drafter = Eagle3Drafter(
        Eagle3Config.tiny(**fields, own_embeddings=False, num_hidden_layers=1, draft_vocab_size=None)
    )
    drafter.initialise_from(target)
    batch = LiveFeatures(target, drafter.feature_layers)(
        TrainingBatch(
            input_ids=text,
            document_ids=torch.ones_like(text),
            position_ids=torch.arange(text.shape[1])[None],
            loss_mask=torch.arange(text.shape[1])[None] >= 8,
        )
    )
    batch.features = batch.features.roll(shift, 1)
    view = TargetView(target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(80):
        loss = loss_of(drafter, view, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.eval()
    out = target.generate(
        **padded(prompt.tolist()),
        max_new_tokens=48,
        do_sample=False,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, text)
    if shift:
        assert out.speculation.acceptance < 0.5
        return
    assert out.speculation.acceptance >= 0.9
    # The walk of the anchors tells the same.
    with torch.no_grad():
        unrolled = drafter.unroll(view, batch, steps=4, anchors=None)
        matches = (drafter.logits(view, unrolled.hidden).argmax(-1) == unrolled.labels) & unrolled.mask
    assert simulated_tau(matches, unrolled.anchors, batch) == pytest.approx(out.speculation.tau, rel=0.05)
