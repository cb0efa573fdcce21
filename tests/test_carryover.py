"""Carryover: a draft reads the target's states of the tokens that were rejected last, and no later draft does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from targets import NEW_TOKENS, padded, plain, prompts, target
from test_block import RULES, WIDTH, commit, context, logits_alone, make_drafter, make_target, states
from test_lossless import assert_equals_plain
from test_trainer import arguments
from test_trainer import make_drafter as make_small
from test_trainer import make_target as make_small_target
from test_trainer import rows as texts
from test_unroll_block import LONG, OTHER, SHORT, pack
from torch.nn import functional as F

from hf_specdraft.draft import Commit, Features
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter, BlockSession
from hf_specdraft.features import selected
from hf_specdraft.target import TargetPass
from hf_specdraft.training.features import LiveFeatures
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.training.trainer import DraftTrainer
from hf_specdraft.training.verify import BranchVerifier


@pytest.fixture(scope="module")
def view():
    return TargetView(make_target())


def carrying(**fields):
    drafter = make_drafter(carryover=True, **fields)
    torch.nn.init.normal_(drafter.carry_embedding)
    return drafter


def rejected(row, first, count):
    """States of a wrong continuation from position `first` on."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1000 + 10 * row + first))


def round_of(spans, counts):
    """The commit of a round: features of (row, from, to), and `counts[b]` rejected rows from `to` on."""
    hidden = torch.zeros(len(spans), max(counts), WIDTH)
    for b, ((row, _, stop), count) in enumerate(zip(spans, counts)):
        hidden[b, :count] = rejected(row, stop, count)
    made = commit(spans)
    return Commit(made.tokens, made.features, Features(hidden, counts, [stop for _, _, stop in spans]))


@torch.no_grad()
def carried_alone(drafter, view, row, anchor, position, count):
    """Recomputed from scratch: the context, and behind it `count` rejected rows from `position` on."""
    ids = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    ids[0, 0] = anchor
    at = torch.cat((torch.arange(position), position + torch.arange(count)))[None]
    out = drafter(
        ids,
        torch.cat((states(row, position), rejected(row, position, count)))[None],
        at,
        torch.arange(position, position + ids.shape[1])[None],
        carried=torch.arange(position + count)[None] >= position,
    )
    return out.logits[0, drafter.config.first_slot :]


@pytest.mark.parametrize(("rule", "causal"), RULES)
def test_a_draft_reads_the_rejected_rows_of_the_last_round_only(rule, causal, view):
    """The card's check 2, with rows of a batch that rejected different numbers, some none; then a row leaves."""
    drafter = carrying(sliding_rule=rule, sliding_causal=causal)
    session, spans = drafter.start(view, 3), [(0, 0, 6), (1, 0, 12), (2, 0, 3)]
    session.observe(commit(spans))
    session.propose(context([1, 2, 3], [6, 12, 3]))
    for grow, counts in [
        ((1, 4, 2), (3, 0, 2)),
        ((2, 1, 3), (2, 3, 1)),
        ((1, 1, 1), (0, 0, 0)),
        ((3, 1, 1), (0, 2, 3)),
    ]:
        spans = [(row, stop, stop + more) for (row, _, stop), more in zip(spans, grow)]
        session.observe(round_of(spans, list(counts)))
        reach = [stop for _, _, stop in spans]
        drafts = [session.propose(context([4, 5, 6], reach)).evidence.logits for _ in range(2)]
        assert torch.equal(*drafts) and session.cache.counts == reach
        for b, (row, _, stop) in enumerate(spans):
            want = carried_alone(drafter, view, row, 4 + b, stop, counts[b])
            torch.testing.assert_close(drafts[0][b], want, atol=1e-4, rtol=0)
    session.observe(round_of([(row, stop, stop + 1) for row, _, stop in spans], [2, 1, 3]))
    session.keep([2, 0])
    got = session.propose(context([6, 4], [reach[2] + 1, reach[0] + 1])).evidence.logits
    torch.testing.assert_close(got[0], carried_alone(drafter, view, 2, 6, reach[2] + 1, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(got[1], carried_alone(drafter, view, 0, 4, reach[0] + 1, 2), atol=1e-4, rtol=0)
    # A round without a draft: there is nothing to carry over.
    session.observe(commit([(2, reach[2] + 1, reach[2] + 2), (0, reach[0] + 1, reach[0] + 2)]))
    got = session.propose(context([6, 4], [reach[2] + 2, reach[0] + 2])).evidence.logits
    torch.testing.assert_close(got[0], logits_alone(drafter, view, 2, 6, reach[2] + 2), atol=1e-4, rtol=0)


def test_without_rejected_rows_it_is_the_plain_drafter(view):
    """The card's check 1, bit for bit."""
    base = make_drafter()
    drafter = base.grown(carryover=True)
    assert not drafter.carry_embedding.any() and not make_drafter(carryover=True).carry_embedding.any()
    torch.nn.init.normal_(drafter.carry_embedding)
    sessions = [one.start(view, 2) for one in (base, drafter)]
    spans = [(0, 0, 6), (1, 0, 9)]
    for counts in ([0, 0], None, [0, 0]):
        drafts = []
        for session in sessions:
            session.observe(commit(spans) if counts is None else round_of(spans, counts))
            drafts.append(session.propose(context([1, 2], [stop for _, _, stop in spans])))
        assert torch.equal(drafts[0].evidence.logits, drafts[1].evidence.logits)
        spans = [(row, stop, stop + 2) for row, _, stop in spans]


def test_the_rejected_rows_are_those_of_the_target(monkeypatch):
    """Brought to those who ask: the target's own states of the drafted tokens behind the accepted ones."""
    model, heard, drafted = target("llama"), [], []
    observe, propose = BlockSession.observe, BlockSession.propose

    def spy(session, news):
        heard.append(news)
        observe(session, news)

    def draft(session, request):
        drafted.append(propose(session, request))
        return drafted[-1]

    monkeypatch.setattr(BlockSession, "observe", spy)
    monkeypatch.setattr(BlockSession, "propose", draft)
    answers, lengths = plain("llama"), [len(row) for row in prompts()]
    drafter = carrying(policy="fixed")
    assert_equals_plain(model, answers, drafter)
    assert heard[0].rejected is None
    done = [1] * len(answers)
    for news, proposal in zip(heard[1:], drafted):
        for b, new in enumerate(news.tokens):
            count = int(proposal.valid[b].sum()) - (len(new) - 1)
            assert news.rejected.counts[b] == count
            start = lengths[b] + done[b] - 1  # the anchor's position
            assert news.rejected.start[b] == start + len(new)
            text = answers[b][: start + 1] + proposal.tokens[b, proposal.valid[b]].tolist()
            if len(news.tokens) == len(answers) and done[b] < 4 and count:
                with torch.no_grad():
                    every = model(torch.tensor([text]), output_hidden_states=True).hidden_states
                want = selected(every, drafter.feature_layers, torch.device("cpu"))[0, -count:]
                torch.testing.assert_close(news.rejected.hidden[b, :count], want, atol=1e-3, rtol=1e-3)
            done[b] += len(new)
        if len(news.tokens) < len(answers) or max(done) > NEW_TOKENS // 2:
            break
    assert min(done) > 3


def test_nobody_else_is_brought_them(monkeypatch):
    heard, observe = [], BlockSession.observe
    monkeypatch.setattr(BlockSession, "observe", lambda session, news: (heard.append(news), observe(session, news)))
    assert_equals_plain(target("llama"), plain("llama"), make_drafter(policy="fixed"))
    assert all(news.rejected is None for news in heard)


def test_the_targets_cache_holds_what_was_committed(monkeypatch):
    """The card's check 3."""
    commit_pass, rounds = TargetPass.commit, []

    def spy(target_pass, width, kept, tokens, rows):
        commit_pass(target_pass, width, kept, tokens, rows)
        rounds.append((target_pass.cache.get_seq_length(), target_pass.rows.lengths, tokens))

    monkeypatch.setattr(TargetPass, "commit", spy)
    assert_equals_plain(target("llama"), plain("llama", None, (8,)), carrying(policy="fixed"))
    held = 8
    for columns, lengths, tokens in rounds:
        held += tokens[0]
        assert columns == held and lengths == [held]


@pytest.mark.parametrize(
    "fields", [{}, {"corrector": {"name": "markov", "rank": 4}}, {"max_stages": 2, "stage_threshold": -10.0}]
)
def test_greedy_output_is_plain(fields):
    stats = assert_equals_plain(target("llama"), plain("llama"), carrying(policy="fixed", **fields))
    assert 0 <= stats.accepted < stats.verified


def test_rows_that_end_early_leave_the_others_alone():
    model, rows, texts = target("llama"), padded(prompts()), []
    settings = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=plain("llama")[0][-NEW_TOKENS + 4])
    for assistant in (None, carrying(policy="fixed")):
        texts.append(model.generate(**rows, assistant_model=assistant, **settings))
    assert torch.equal(*texts)


def test_a_tree_carries_nothing_over(monkeypatch):
    heard, observe = [], BlockSession.observe
    monkeypatch.setattr(BlockSession, "observe", lambda session, news: (heard.append(news), observe(session, news)))
    assert_equals_plain(target("llama"), plain("llama"), carrying(policy="fixed", tree_nodes=6))
    assert all(news.rejected is None for news in heard)


# ---- training ----


@pytest.fixture(scope="module")
def world():
    """A target, a batch of two rows with three documents, and the target's verdicts on its branches."""
    model = make_target()
    drafter = carrying(draft_vocab_size=None).train()
    batch = LiveFeatures(model, drafter.feature_layers, law=False)(pack([[SHORT, LONG], [OTHER]]))
    batch.verify = BranchVerifier(model, drafter.feature_layers)
    return model, drafter, batch


@pytest.mark.parametrize("group", [4, 256])
def test_branches_are_verified_as_texts_of_their_own(group, world, monkeypatch):
    monkeypatch.setattr("hf_specdraft.training.verify.GROUP", group)
    model, drafter, batch = world
    columns = torch.tensor([[2, 11, 25], [7, 0, 9]])
    drafts = torch.randint(60, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    features, choices = batch.verify(batch, columns, drafts)
    for b in range(2):
        for a in range(3):
            column = int(columns[b, a])
            begin = column - int(batch.position_ids[b, column])
            text = torch.cat((batch.input_ids[b, begin : column + 1], drafts[b, a]))[None]
            with torch.no_grad():
                out = model(text, output_hidden_states=True)
            want = selected(out.hidden_states, drafter.feature_layers, torch.device("cpu"))[0, -4:]
            torch.testing.assert_close(features[b, a], want, atol=1e-4, rtol=1e-4)
            assert torch.equal(choices[b, a], out.logits[0, -5:].argmax(-1))


def test_branches_of_windowed_and_eager_targets():
    for name, attention in (("mistral", "sdpa"), ("gemma2", "eager"), ("llama", "eager")):
        model = target(name, attention)
        text = torch.randint(1, 60, (1, 24), generator=torch.Generator().manual_seed(3))
        batch = pack([[(text[0], torch.ones(24, dtype=torch.bool), torch.zeros(24, WIDTH))]])
        drafts = torch.randint(1, 60, (1, 1, 3), generator=torch.Generator().manual_seed(4))
        features, choices = BranchVerifier(model, (0,))(batch, torch.tensor([[19]]), drafts)
        with torch.no_grad():
            out = model(torch.cat((text[:, :20], drafts[0]), 1), output_hidden_states=True)
        torch.testing.assert_close(features[0, 0], out.hidden_states[1][0, -3:], atol=1e-4, rtol=1e-3)
        assert torch.equal(choices[0, 0], out.logits[0, -4:].argmax(-1))


@pytest.mark.parametrize(("rule", "causal"), RULES[1:3])
def test_the_second_draft_in_training_is_that_of_decoding(rule, causal, world, view):
    model, _, batch = world
    drafter = carrying(draft_vocab_size=None, sliding_rule=rule, sliding_causal=causal).train()
    mode = {"name": "carryover", "dropout": 0.0}
    with torch.no_grad():
        unrolled = drafter.unroll(view, batch, anchors=None, mode=mode)
    width, carried = batch.input_ids.shape[1], 0
    pairs = {}
    for index, start in enumerate(unrolled.anchors.tolist()):
        pairs.setdefault(start, []).append(index)
    for row, document in ((0, SHORT), (0, LONG), (1, OTHER)):
        begin = len(SHORT[0]) if document is LONG else 0
        features = batch.features[row, begin : begin + len(document[0])]
        for anchor in range(int(document[1].int().argmax()), len(document[0]) - 1):
            session = drafter.start(view, 1)
            session.observe(Commit([[0]], Features(features[None, :anchor], [anchor], [0])))
            draft = session.propose(context([int(document[0][anchor])], [anchor]))
            text = torch.cat((document[0][: anchor + 1], draft.tokens[0]))[None]
            with torch.no_grad():
                out = model(text, output_hidden_states=True)
            hidden = selected(out.hidden_states, drafter.feature_layers, torch.device("cpu"))
            choices = out.logits[0, anchor:-1].argmax(-1)
            accepted = int((choices == draft.tokens[0]).long().cumprod(0).sum())
            new = anchor + accepted + 1
            if new >= len(document[0]) - 1:
                continue
            # As in decoding, but the text's own words where the target accepted others.
            news = Features(features[None, anchor:new], [new - anchor], [anchor])
            count = draft.shape[1] - accepted
            left = Features(hidden[:, new:], [count], [new])
            session.observe(Commit([[0]], news, left))
            want = session.propose(context([int(document[0][new])], [new])).evidence.hidden[0]
            index = pairs[row * width + begin + new].pop(0)
            torch.testing.assert_close(unrolled.hidden[index], want, atol=1e-4, rtol=0)
            carried += count
    assert carried > 20 and not any(unrolled.mask[i, 0] for rest in pairs.values() for i in rest)


def test_accepted_rows_are_not_carried_in_training(world, view):
    """Of a target that accepts 0, 1, 2 or all 3 of a draft's tokens, by the anchor's column."""
    model, drafter, batch = world
    told = batch.verify

    def verify(batch, columns, drafts):
        features, choices = told(batch, columns, drafts)
        right = torch.arange(3) < (columns % 4)[..., None]
        choices[..., :3] = torch.where(right, drafts, (drafts + 1) % 60)
        return features, choices

    given = replace(batch, verify=verify)
    with torch.no_grad():
        unrolled = drafter.unroll(view, given, anchors=None, mode={"name": "carryover", "dropout": 0.0})
    starts, seen = unrolled.anchors.tolist(), set()
    for anchor in range(int(OTHER[1].int().argmax()), len(OTHER[0]) - 1):
        features = batch.features[1]
        new = anchor + anchor % 4 + 1
        if new >= len(OTHER[0]) - 1:
            continue
        session = drafter.start(view, 1)
        session.observe(Commit([[0]], Features(features[None, :anchor], [anchor], [0])))
        draft = session.propose(context([int(OTHER[0][anchor])], [anchor]))
        states, _ = told(batch, torch.tensor([[0], [anchor]]), torch.cat((draft.tokens, draft.tokens))[:, None])
        count = 3 - anchor % 4
        left = Features(states[1:, 0, 3 - count :], [count], [new]) if count else None
        session.observe(Commit([[0]], Features(features[None, anchor:new], [new - anchor], [anchor]), left))
        want = session.propose(context([int(OTHER[0][new])], [new])).evidence.hidden[0]
        mine = [unrolled.hidden[i] for i, start in enumerate(starts) if start == batch.input_ids.shape[1] + new]
        assert any(torch.allclose(hidden, want, atol=1e-4) for hidden in mine)
        seen.add(count)
    assert seen == {0, 1, 2, 3}


def test_the_loss_reaches_the_mark_through_the_second_draft_only(world, view):
    _, drafter, batch = world
    for dropout in (0.0, 1.0):
        drafter.zero_grad()
        unrolled = drafter.unroll(view, batch, anchors=None, mode={"name": "carryover", "dropout": dropout})
        F.cross_entropy(drafter.logits(view, unrolled.hidden).flatten(0, 1), unrolled.labels.flatten()).backward()
        gradient = drafter.carry_embedding.grad
        assert (gradient is None or not gradient.any()) == (dropout == 1.0)
        assert drafter.fc.weight.grad.any()


@pytest.mark.parametrize(("fields", "part"), [({"carryover": True}, "carry"), ({"max_stages": 2}, "own_states")])
def test_the_trainer_trains_it(fields, part, tmp_path):
    """Every step gives the target to the unroll; evaluation goes on as for a plain drafter."""
    trainer = DraftTrainer(
        make_small(**fields),
        arguments(tmp_path, max_steps=3, unroll={"anchors": 4}),
        target=make_small_target(),
        loss=DraftLoss("ce"),
        train_dataset=texts(8),
        eval_dataset=texts(2, seed=1),
        eval_prompts=[("random", torch.tensor([5, 3, 9]))],
    )
    torch.manual_seed(0)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_tau"] >= 1 and metrics["eval_simulated_tau"] >= 1
    parts = [weight for name, weight in trainer.drafter.named_parameters() if name.startswith(part)]
    assert parts and all(weight.any() for weight in parts)


def test_refusals(world, view):
    _, drafter, batch = world
    plainly = make_drafter(draft_vocab_size=None).train()
    with pytest.raises(ValueError, match="carryover: true"):
        plainly.unroll(view, batch, mode="carryover")
    with pytest.raises(ValueError, match="batch.verify"):
        drafter.unroll(view, pack([[LONG]]))
    with pytest.raises(ValueError, match="takes no masks of branches"):
        BranchVerifier(target("bloom"), (0,))
    with pytest.raises(ValueError, match="rejected tokens"):
        make_drafter(carryover=True, own_embeddings=False, own_head=False, draft_vocab_size=None).to_dialect("zlab")
    # A text has no rounds: evaluation drafts from every anchor.
    assert len(drafter.eval().unroll(view, pack([[LONG]]), anchors=None).anchors) == len(LONG[0]) - 2
    drafter.train()


def test_the_target_verifies_where_the_mode_asks_it_to(tmp_path, monkeypatch):
    """A target that takes no masks of branches serves the other modes."""
    monkeypatch.setattr("hf_specdraft.training.verify.tree_form", lambda target: None)

    def trainer(**unroll) -> DraftTrainer:
        args, data = arguments(tmp_path, max_steps=1, unroll=unroll), texts(2)
        drafter = make_small(carryover=True)
        return DraftTrainer(drafter, args, target=make_small_target(), loss=DraftLoss("ce"), train_dataset=data)

    for mode in ("plain", {"name": "plain"}):
        assert trainer(mode=mode).verify is None
    with pytest.raises(ValueError, match="takes no masks of branches"):
        trainer()


def revealing(generator, others=False):
    """Random texts, which nothing foretells but the rejected rows: each tells the token after it. Nothing is accepted.

    others: whether they tell another text's.
    """
    ids = torch.randint(12, (8, 20), generator=generator)
    told, tokens = torch.randint(12, (8, 20), generator=generator) if others else ids, torch.ones_like(ids)

    def verify(batch, columns, drafts):
        after = columns[..., None] + 2 + torch.arange(drafts.shape[2])
        after = told.gather(1, after.clamp(max=19).flatten(1)).view_as(after)
        return F.one_hot(after, 12).float(), torch.cat((drafts, drafts[..., :1]), 2) + 12

    features = F.one_hot(ids, 12).float()
    return TrainingBatch(ids, tokens, torch.arange(20).expand(8, 20), tokens.bool(), features, verify=verify)


def test_what_rejected_rows_tell_is_learnt():
    """The card's check 4: better than without them, and only by the row's own."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=12, target_hidden_size=12, target_layer_ids=[0], draft_vocab_size=None, mask_token_id=0)
    layers = dict(num_hidden_layers=1, layer_types=["full_attention"], initializer_range=0.1, block_size=3)
    drafter = BlockDrafter(BlockConfig.tiny(**sizes, **layers, carryover=True)).train()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    generator, view = torch.Generator().manual_seed(0), SimpleNamespace(vocab_size=12)

    def accuracy(batch, dropout=0.0):
        with torch.no_grad():
            unrolled = drafter.unroll(view, batch, anchors=None, mode={"name": "carryover", "dropout": dropout})
        right = (drafter.lm_head(unrolled.hidden).argmax(-1) == unrolled.labels)[unrolled.mask]
        return float(right.float().mean())

    for _ in range(60):
        unrolled = drafter.unroll(view, revealing(generator), anchors=None)
        loss = F.cross_entropy(drafter.lm_head(unrolled.hidden)[unrolled.mask], unrolled.labels[unrolled.mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert accuracy(revealing(generator)) > 0.9
    assert accuracy(revealing(generator), dropout=1.0) < 0.25 and accuracy(revealing(generator, others=True)) < 0.25
