"""DLoop's stages and FailFast's chunks: several blocks before one verification."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bias import distance
from targets import NEW_TOKENS, padded, plain, prompts, target
from test_block import RULES, WIDTH, commit, context, make_drafter, make_target, states
from test_lossless import assert_equals_plain
from test_sampling_law import PROMPT, REQUESTS, V, exact_law, p_value
from test_sampling_law import target as law_target
from test_unroll_block import LONG, OTHER, SHORT, pack
from torch.nn import functional as F

from hf_specdraft import AutoDrafter, BlockConfig, BlockDrafter
from hf_specdraft.draft import Block, Commit, Draft, Features, Law
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.drafters.block import BlockSession, stages, unroll_edit
from hf_specdraft.policies.failfast import FailFast
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.trees import prune

K = 3  # drafts of a tiny block


@pytest.fixture(scope="module")
def view():
    return TargetView(make_target())


def marked(drafter):
    """Later stages that can be told from the first."""
    for weight in drafter.own_states.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return drafter


def looping(**fields):
    return marked(make_drafter(**{"max_stages": 3, "stage_threshold": -math.inf, "stage_adapter": True, **fields}))


@torch.no_grad()
def later_block(drafter, view, row, position, draft, stage):
    """A block of a later stage recomputed at once, without any cache: [K, vocabulary] logits."""
    config, start = drafter.config, position + stage * K
    hidden = draft.evidence.hidden[:1, : stage * K - 1]
    made = torch.arange(stage * K - 1) // K
    rows = torch.cat((drafter.fused(states(row, position)[None]), drafter.reread(hidden, made)), 1)
    at = torch.cat((torch.arange(position), position + 1 + torch.arange(stage * K - 1)))[None]
    ids = torch.full((1, config.block_size), config.mask_token_id)
    ids[0, 0] = draft.tokens[0, stage * K - 1]
    drafter.fused, fused = lambda *given: rows, drafter.fused  # rows as they are
    out = drafter(ids, rows, at, start + torch.arange(config.block_size)[None])
    drafter.fused = fused
    return out.logits[0, config.first_slot :]


@pytest.mark.parametrize(("rule", "causal"), RULES)
def test_later_stages_read_the_states_of_earlier_ones(rule, causal, view):
    drafter = looping(sliding_rule=rule, sliding_causal=causal)
    for row, length in ((0, 6), (1, 13)):
        session = drafter.start(view, 1)
        session.observe(commit([(row, 0, length)]))
        draft = session.propose(context([5], [length], [3 * K]))
        assert draft.shape == (1, 3 * K) and draft.valid.all() and draft.evidence.logits.shape[1] == 3 * K
        for stage in (1, 2):
            want = later_block(drafter, view, row, length, draft, stage)
            got = draft.evidence.logits[0, stage * K : (stage + 1) * K]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_rows_stop_by_themselves(view):
    """One row goes on, one has no room, one stops: each drafts what it drafts alone."""
    drafter = looping()
    spans, anchors, lengths = [(0, 0, 9), (1, 0, 4), (2, 0, 6)], [5, 6, 7], [8, 2, 9]
    session = drafter.start(view, 3)
    session.observe(commit(spans))
    request = context(
        anchors, [9, 4, 6], lengths, more=lambda p: [a and b for a, b in zip(p.own, (True, True, p.step < 4))]
    )
    together = session.propose(request)
    assert together.valid.sum(1).tolist() == [8, 2, 6]
    for b, kept in enumerate((8, 2, 6)):
        alone = drafter.start(view, 1)
        alone.observe(commit(spans[b : b + 1]))
        draft = alone.propose(context(anchors[b : b + 1], [spans[b][2]], [kept]))
        torch.testing.assert_close(together.evidence.logits[b, :kept], draft.evidence.logits[0], atol=1e-4, rtol=0)
        assert torch.equal(together.tokens[b, :kept], draft.tokens[0])
    assert session.cache.counts == [9, 4, 6]


def test_one_stage_and_an_infinite_threshold_are_the_plain_drafter(view):
    base = make_drafter()
    drafts = []
    grown = base.grown(max_stages=3, stage_threshold=math.inf, stage_adapter=True)
    for drafter in (base, grown, base.grown(stage_threshold=-math.inf)):
        session = drafter.start(view, 2)
        session.observe(commit([(0, 0, 6), (1, 0, 9)]))
        drafts.append(session.propose(context([1, 2], [6, 9], [9, 9])))
    for draft in drafts[1:]:
        assert torch.equal(draft.evidence.logits, drafts[0].evidence.logits)
        assert torch.equal(draft.tokens, drafts[0].tokens) and draft.shape == (2, K)


def test_a_rejected_stage_leaves_nothing_behind(view):
    drafter = looping()
    sessions = [drafter.start(view, 2) for _ in range(2)]
    for reach in (6, 8, 9):
        drafts = []
        for session, lengths in zip(sessions, ([3 * K, 2 * K], [K, K])):
            begun = [(0, {6: 0, 8: 6, 9: 8}[reach], reach), (1, {6: 0, 8: 4, 9: 6}[reach], reach - 2)]
            session.observe(commit(begun))
            drafts.append(session.propose(context([1, 2], [reach, reach - 2], lengths)))
        assert drafts[0].shape == (2, 3 * K)
        assert torch.equal(drafts[0].evidence.logits[:, :K], drafts[1].evidence.logits)
        ours, theirs = (session.cache for session in sessions)
        assert ours.counts == theirs.counts == [reach, reach - 2]
        assert torch.equal(ours.positions[:, :reach], theirs.positions[:, :reach])
        for layer in range(2):
            for mine, other in zip(ours.read(layer), theirs.read(layer)):
                for row, count in enumerate(ours.counts):
                    assert torch.equal(mine[row, :, :count], other[row, :, :count])


def test_the_score_of_a_block_decides(view):
    """DLoop's rule: the sum of the log-probabilities of the block's tokens against the threshold."""
    plainly = make_drafter()
    session = plainly.start(view, 2)
    session.observe(commit([(0, 0, 6), (1, 0, 9)]))
    draft = session.propose(context([1, 2], [6, 9]))
    scores = draft.evidence.logits.log_softmax(-1).amax(-1).sum(1).tolist()
    between = sum(scores) / 2
    drafter = plainly.grown(max_stages=2, stage_threshold=between)
    session = drafter.start(view, 2)
    session.observe(commit([(0, 0, 6), (1, 0, 9)]))
    lengths = session.propose(context([1, 2], [6, 9], [2 * K, 2 * K])).valid.sum(1).tolist()
    assert lengths == [2 * K if score > between else K for score in scores] and sorted(lengths) == [K, 2 * K]


def sure(logits):
    return logits.softmax(-1).amax(-1)


def scripted_blocks(monkeypatch, answers, chance=lambda position: 0.99):
    """Blocks that are always right, each token with the probability that `chance` gives to its position; `answers`
    are the rows' whole texts (one row, or all alike)."""

    def block_pass(session, request, slots, ids=None):
        width = slots.stop - slots.start
        logits = torch.zeros(len(request.position), width, 64)
        for b, position in enumerate(request.position):
            for slot in range(width):
                at = position + 1 + slot
                q = chance(at)
                token = answers[b][at] if at < len(answers[b]) else 1
                logits[b, slot] = math.log((1 - q) / 63)
                logits[b, slot, token] = math.log(q)
        return Block(logits, None, torch.zeros(len(logits), width, 32), request.anchor)

    monkeypatch.setattr(BlockSession, "block_pass", block_pass)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_predictable_text_takes_one_pass_in_so_many_tokens(count, monkeypatch):
    answers = plain("llama", None, (8,))
    scripted_blocks(monkeypatch, answers)
    drafter = make_drafter(max_stages=count, draft_vocab_size=None, policy="fixed")
    stats = assert_equals_plain(target("llama"), answers, drafter)
    assert stats.acceptance == 1 and stats.rounds == [math.ceil((NEW_TOKENS - 1) / (count * K + 1))]


FORCED = {
    "all sure": (lambda at: 0.99, 11),
    "none sure": (lambda at: 0.2, K),
    "one unsure in the second chunk": (lambda at: 0.3 if at == 8 + K + 2 else 0.99, 2 * K),
}


@pytest.mark.parametrize("forced", FORCED)
def test_failfast_extends_sure_drafts(forced, monkeypatch):
    """The card's check 1; the unsure chunk is verified all the same."""
    chance, length = FORCED[forced]
    answers, offered = plain("llama", None, (8,)), []
    scripted_blocks(monkeypatch, answers, chance)
    propose = BlockSession.propose

    def spy(session, request):
        offered.append(propose(session, request))
        return offered[-1]

    monkeypatch.setattr(BlockSession, "propose", spy)
    drafter = make_drafter(draft_vocab_size=None, policy={"name": "failfast", "max_draft": 11})
    stats = assert_equals_plain(target("llama"), answers, drafter)
    assert offered[0].valid.sum() == length
    assert stats.offered_by_depth[0] == len(offered) and stats.acceptance == 1


@pytest.mark.parametrize("wrong", range(1, 12))
def test_failfast_draft_that_fails_at_each_place(wrong, monkeypatch):
    """A draft of four chunks, the last one short, whose token `wrong` is not the target's, in every round."""
    answers, begun = plain("llama", None, (8,)), []
    propose, observe = BlockSession.propose, BlockSession.observe
    scripted_blocks(monkeypatch, answers)
    block_pass, heard = BlockSession.block_pass, []

    def misled(session, request, slots, ids=None):
        block = block_pass(session, request, slots, ids)
        slot = begun[-1] + wrong - request.position[0] - 1
        if 0 <= slot < block.logits.shape[1]:
            block.logits[0, slot] = block.logits[0, slot].roll(1)
        return block

    def proposing(session, request):
        begun.append(request.position[0])
        return propose(session, request)

    def hearing(session, news):
        heard.append(len(news.tokens[0]))
        observe(session, news)

    for name, spy in (("block_pass", misled), ("propose", proposing), ("observe", hearing)):
        monkeypatch.setattr(BlockSession, name, spy)
    policy = {"name": "failfast", "max_draft": 11}
    assert_equals_plain(target("llama"), answers, make_drafter(draft_vocab_size=None, policy=policy))
    rounds = (NEW_TOKENS - 1) // wrong
    assert heard[1 : 1 + rounds] == [wrong] * rounds, "as many as before it, and the target's own"


def test_failfast_is_lossless_whatever_is_rejected():
    """The card's check 4 with a drafter of random weights: batches, ragged rows, and rejections at all depths."""
    policy = {"name": "failfast", "min_confidence": 0.03, "max_draft": 10}
    drafter = make_drafter(policy=policy)
    stats = assert_equals_plain(target("llama"), plain("llama"), drafter)
    assert len(stats.offered_by_depth) > K


def test_failfast_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="no option increment"):
        make_drafter(policy={"name": "failfast", "increment": 4})
    with pytest.raises(ValueError, match="min_confidence"):
        make_drafter(policy={"name": "failfast", "min_confidence": 2})


@pytest.mark.parametrize("corrector", [None, {"name": "markov", "rank": 4}])
def test_greedy_output_is_plain(corrector):
    """A batch of ragged rows, deep drafts, some rows going on and others not."""
    drafter = looping(stage_threshold=-9.5, corrector=corrector, policy="fixed")
    stats = assert_equals_plain(target("llama"), plain("llama"), drafter)
    assert stats.offered_by_depth[0] > stats.offered_by_depth[K] > stats.offered_by_depth[2 * K] > 0


def test_rows_that_end_early_leave_the_others_alone():
    model, rows, texts = target("llama"), padded(prompts()), []
    settings = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=plain("llama")[0][-NEW_TOKENS + 4])
    for assistant in (None, looping(policy="fixed")):
        texts.append(model.generate(**rows, assistant_model=assistant, **settings))
    assert torch.equal(*texts)


def staged(whole: Draft, more=None, **fields) -> Draft:
    """What `draft_stages` makes of chains of two tokens, a block each: row by row the second one only if it goes on."""
    config = BlockConfig.tiny(block_size=2, max_stages=2, **fields)
    made = []

    def draft_block(request):
        slot = len(made)
        law = Law(whole.law.probs[:, slot : slot + 1], None, whole.law.rows)
        block = replace(whole.evidence, logits=law.probs.log(), hidden=torch.zeros(len(law.probs), 1, 1))
        sure = law.probs.amax(-1)
        lengths = [min(1, n) for n in request.lengths]
        made.append(slot)
        return Draft.chain(
            whole.tokens[:, slot : slot + 1], lengths, law=law, confidence=sure, confidence_kind="prior", evidence=block
        )

    session = SimpleNamespace(draft_block=draft_block, drafter=SimpleNamespace(config=config), temporary={})
    rows = len(whole.tokens)
    return stages.draft_stages(session, context([0] * rows, [5] * rows, [2] * rows, **({"more": more} if more else {})))


def test_stages_keep_the_targets_law_by_enumeration():
    """A second block for the drafts whose first token was likely: exact, though the decision saw the token."""
    seen = set()
    for seed in range(20):
        for threshold in (-0.7, -1.0, -1.3):
            lengths = []

            def decide(whole, threshold=threshold, lengths=lengths):
                draft = staged(whole, stage_threshold=threshold)
                lengths += draft.valid.sum(1).tolist()
                assert draft.confidence_kind == "pre"
                return draft

            assert distance(seed, decide) < 1e-12
            seen.add(frozenset(lengths))
        failfast = FailFast(None, 0.4, 2)
        assert distance(seed, lambda whole, more=failfast.more: staged(whole, more)) < 1e-12
    assert frozenset({1, 2}) in seen


def test_dropping_the_token_that_decided_would_be_noticed():
    def decide(whole):
        draft = staged(whole, stage_threshold=-1.0)
        return prune(draft, draft.valid.all(1, keepdim=True).expand_as(draft.valid), looked_at_token=False)

    assert max(distance(seed, decide) for seed in range(5)) > 0.01


def test_sampled_output_has_the_targets_law():
    torch.manual_seed(1)
    fields = dict(block_size=3, max_stages=2, stage_threshold=-2.5, policy="fixed", num_assistant_tokens=4)
    drafter = BlockDrafter(
        BlockConfig.tiny(vocab_size=V, draft_vocab_size=None, mask_token_id=5, initializer_range=0.5, **fields)
    ).eval()
    out = law_target().generate(
        torch.tensor([PROMPT] * 2500),
        do_sample=True,
        max_new_tokens=5,
        assistant_model=drafter,
        return_dict_in_generate=True,
        **REQUESTS["temperature"].settings,
    )
    assert p_value(out.sequences[:, len(PROMPT) : len(PROMPT) + 3], exact_law("temperature")) > 1e-4
    counts = out.speculation.offered_by_depth
    assert 0.1 * counts[1] < counts[2] < 0.9 * counts[1]


def test_a_cut_that_looks_at_the_number_of_stages_is_told_so(view):
    """Once a decision looked at drawn tokens, confidence is no longer a prior's, in drafts of one block, too."""
    for lengths, kind in (([K], "prior"), ([2 * K], "pre")):
        session = looping(stage_threshold=math.inf).start(view, 1)
        session.observe(commit([(0, 0, 6)]))
        assert session.propose(context([1], [6], lengths, do_sample=True)).confidence_kind == kind


def test_the_law_of_a_staged_draft_is_that_of_its_blocks(view):
    drafter = looping(draft_vocab_size=None)
    session = drafter.start(view, 2)
    session.observe(commit([(0, 0, 6), (1, 0, 8)]))
    draft = session.propose(context([1, 2], [6, 8], [2 * K, 2 * K], do_sample=True))
    torch.testing.assert_close(draft.law.probs, draft.evidence.logits.softmax(-1))
    chances = stages._chances(draft)
    torch.testing.assert_close(chances, draft.law.probs.gather(2, draft.tokens[..., None])[..., 0])
    assert (draft.confidence[:, 1:] <= draft.confidence[:, :-1]).all()
    greedy = session.propose(context([1, 2], [6, 8], [2 * K, 2 * K]))
    torch.testing.assert_close(stages._chances(greedy), sure(greedy.evidence.logits), atol=1e-5, rtol=1e-4)


def test_a_checkpoint_keeps_its_stages(tmp_path):
    drafter = looping()
    assert drafter.config.num_assistant_tokens == 3 * K
    assert make_drafter().grown(max_stages=2).config.num_assistant_tokens == 2 * K
    assert make_drafter(num_assistant_tokens=2).grown(max_stages=2).config.num_assistant_tokens == 2
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_stages"] == 3
    loaded = AutoDrafter.from_pretrained(tmp_path)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    with pytest.raises(ValueError, match="drafts of several blocks"):
        make_drafter(max_stages=2, own_embeddings=False, own_head=False, draft_vocab_size=None).to_dialect("zlab")
    with pytest.raises(ValueError, match="more than the 6 of max_stages 2"):
        BlockConfig.tiny(max_stages=2, num_assistant_tokens=7)
    with pytest.raises(ValueError, match="max_stages must be"):
        BlockConfig.tiny(max_stages=0)


# ---- training ----


def staged_draft(drafter, view, document, anchor, count, monkeypatch):
    """States [count * K, H] of drafting at `anchor` of a document, its tokens those of the text."""
    tokens, _, features = document
    draft_block = BlockSession.draft_block

    def forced(session, request):
        draft = draft_block(session, request)
        at = request.position[0] + 1
        return replace(draft, tokens=tokens[None, at : at + K])

    with monkeypatch.context() as patch:
        patch.setattr(BlockSession, "draft_block", forced)
        session = drafter.start(view, 1)
        session.observe(commit([(0, 0, 0)]) if not anchor else _features(features[:anchor]))
        return session.propose(context([int(tokens[anchor])], [anchor], [count * K])).evidence.hidden[0]


def _features(hidden):
    return Commit([[0] * len(hidden)], Features(hidden[None], [len(hidden)], [0]))


@pytest.mark.parametrize(("rule", "causal"), RULES)
def test_training_unrolls_the_stages_of_drafting(rule, causal, view, monkeypatch):
    drafter = looping(sliding_rule=rule, sliding_causal=causal).train()
    batch = pack([[SHORT, LONG], [OTHER]])
    seen = set()
    for seed in range(8):
        unrolled = drafter.unroll(view, batch, anchors=None, generator=torch.Generator().manual_seed(seed))
        if unrolled.drafts is None:
            seen.add(1)
            continue
        first = unrolled.hidden[unrolled.drafts]
        assert torch.equal(unrolled.weight, torch.full_like(unrolled.weight, 0.5))
        last, labels = unrolled.hidden[~unrolled.drafts], unrolled.labels[~unrolled.drafts]
        flat, starts = batch.input_ids.flatten(), unrolled.anchors[~unrolled.drafts]
        count = 1 + int((unrolled.rows[~unrolled.drafts][0, 0] - starts[0]) // K)
        seen.add(count)
        width = batch.input_ids.shape[1]
        for index in (0, len(last) // 2, len(last) - 1):
            row, column = divmod(int(starts[index]), width)
            document = OTHER if row else SHORT if column < len(SHORT[0]) else LONG
            anchor = int(batch.position_ids[row, column])
            states = staged_draft(drafter, view, document, anchor, count, monkeypatch)
            torch.testing.assert_close(last[index], states[-K:], atol=1e-4, rtol=0)
            begin = starts[index] + (count - 1) * K
            assert labels[index, 0] == flat[begin + 1] and unrolled.previous[~unrolled.drafts][index, 0] == flat[begin]
        assert torch.isfinite(first).all()
    assert seen == {1, 2, 3}


def test_all_processes_unroll_equally_many_stages(view, monkeypatch):
    """With sharded weights, a process that made a pass more would wait for the others for ever."""
    distributed = unroll_edit.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    drafter, batch = looping().train(), pack([[SHORT, LONG], [OTHER]])
    for told, stages_made in ((0.0, 1), (0.5, 2), (0.999, 3)):
        monkeypatch.setattr(
            distributed, "broadcast_object_list", lambda sent, src, told=told: sent.__setitem__(0, told)
        )
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            unrolled = drafter.unroll(view, batch, anchors=None, generator=generator)
            if stages_made == 1:
                assert unrolled.drafts is None
            else:
                last = ~unrolled.drafts
                assert (unrolled.rows[last][0, 0] - unrolled.anchors[last][0]) == (stages_made - 1) * K


def test_loss_of_the_last_stage_reaches_its_own_parts(view):
    grown = looping().train()
    batch = pack([[SHORT, LONG], [OTHER]])
    for detach in (True, False):
        grown.zero_grad()
        mode = {"name": "loop", "detach": detach}
        for seed in range(9):
            unrolled = grown.unroll(view, batch, anchors=None, mode=mode, generator=torch.Generator().manual_seed(seed))
            if unrolled.drafts is not None:
                break
        unrolled.hidden[~unrolled.drafts].square().sum().backward()
        assert grown.own_states.stage_embedding.grad.any() and grown.own_states.adapter.weight.grad.any()
    with pytest.raises(ValueError, match="max_stages above 1"):
        make_drafter().train().unroll(view, batch, mode="loop")
    assert make_drafter(max_stages=2).eval().unroll(view, batch, anchors=None).drafts is None


@pytest.mark.parametrize("detach", [True, False])
def test_the_loss_of_the_last_stage_goes_back_to_the_first_where_it_may(detach, view):
    """A text of distinct tokens, of which the first ones stand in no later block: only as anchors of first ones."""
    drafter = make_drafter(max_stages=2, draft_vocab_size=None).train()
    text = torch.arange(1, 21), torch.arange(20) >= 0, torch.randn(20, WIDTH)
    for seed in range(9):
        drawn = torch.Generator().manual_seed(seed)
        mode = {"name": "loop", "detach": detach}
        unrolled = drafter.unroll(view, pack([[text]]), anchors=None, mode=mode, generator=drawn)
        if unrolled.drafts is not None:
            break
    unrolled.hidden[~unrolled.drafts].square().sum().backward()
    first = unrolled.anchors[~unrolled.drafts].min() + 1  # the token's id
    gradient = drafter.embed_tokens.weight.grad
    assert gradient[first + K :][:K].any() and gradient[first : first + K].any() != detach


def test_only_the_draft_of_a_round_tells_what_drafts_are_worth(view):
    drafter, batch = looping(predraft={}).train(), pack([[SHORT, LONG], [OTHER]])
    for seed in range(9):
        unrolled = drafter.unroll(view, batch, anchors=None, generator=torch.Generator().manual_seed(seed))
        if unrolled.drafts is not None:
            break
    value = drafter.score(view, unrolled).terms["survival"](None, unrolled.labels, unrolled.mask)
    assert value[unrolled.drafts].any() and not value[~unrolled.drafts].any()


def sums(generator):
    """Texts whose every token is the sum of the two before it, modulo 5, and features that tell each column's own."""
    ids = torch.randint(5, (16, 16), generator=generator)
    for t in range(2, 16):
        ids[:, t] = (ids[:, t - 1] + ids[:, t - 2]) % 5
    places = torch.arange(16).expand(16, 16)
    return TrainingBatch(ids, torch.ones_like(ids), places, places > 1, F.one_hot(ids, 5).float())


def test_later_stages_learn_to_read_own_states():
    """The card's check 4, where the window leaves nothing else to read: a later block's first token is chance before
    training in stages, and right behind it; the first block's stays right."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, target_hidden_size=5, target_layer_ids=[0], draft_vocab_size=None, mask_token_id=0)
    layers = dict(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=2, block_size=3)
    drafter = BlockDrafter(BlockConfig.tiny(**sizes, **layers, max_stages=2, initializer_range=0.1)).train()
    generator, view = torch.Generator().manual_seed(0), SimpleNamespace(vocab_size=5)

    def train(mode, steps, rate):
        optimizer = torch.optim.Adam(drafter.parameters(), lr=rate)
        for _ in range(steps):
            unrolled = drafter.unroll(view, sums(generator), anchors=None, mode=mode)
            logits, mask = drafter.lm_head(unrolled.hidden), unrolled.mask
            optimizer.zero_grad()
            F.cross_entropy(logits[mask], unrolled.labels[mask]).backward()
            optimizer.step()

    def first_token():
        """Accuracy of the first slot of the first block, and of the second."""
        with torch.no_grad():
            for seed in range(9):
                drawn = torch.Generator().manual_seed(seed)
                unrolled = drafter.unroll(view, sums(generator), anchors=None, mode="loop", generator=drawn)
                if unrolled.drafts is not None:
                    break
            right = drafter.lm_head(unrolled.hidden[:, 0]).argmax(-1) == unrolled.labels[:, 0]
        seen = unrolled.mask[:, 0]
        return [float(right[seen & part].float().mean()) for part in (unrolled.drafts, ~unrolled.drafts)]

    train("plain", 50, 1e-2)
    first, second = first_token()
    assert first > 0.98 and second < 0.4
    train("loop", 120, 5e-3)
    first, second = first_token()
    assert first > 0.98 and second > 0.9
