"""The block family: its context cache, its session, its law, saving and loading."""

import pytest
import torch
from conftest import tiny_llama
from scipy.stats import chi2_contingency
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaForCausalLM

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter, BlockSession, ContextCache
from hf_specdraft.drafters.block.modeling_block import rotate, visible

WIDTH = 64  # two layers' states of a target of hidden size 32


def make_target(**overrides):
    torch.manual_seed(1)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.5, **overrides})).eval()


def make_drafter(**overrides):
    torch.manual_seed(0)
    drafter = BlockDrafter(BlockConfig.tiny(initializer_range=0.2, **overrides)).eval()
    if drafter.draft_ids is not None:
        drafter.draft_ids += 10
    return drafter


@pytest.fixture(scope="module")
def view():
    return TargetView(make_target())


def states(row: int, length: int) -> torch.Tensor:
    """The target's states of a row's first `length` positions (the longer ones continue the shorter)."""
    return torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(row))[:length]


def commit(spans: list[tuple[int, int, int]]) -> Commit:
    """Features of (row, from, to) per batch row."""
    width = max(stop - start for _, start, stop in spans)
    hidden = torch.zeros(len(spans), width, WIDTH)
    for b, (row, start, stop) in enumerate(spans):
        hidden[b, : stop - start] = states(row, stop)[start:]
    counts = [stop - start for _, start, stop in spans]
    return Commit([[0] * count for count in counts], Features(hidden, counts, [start for _, start, _ in spans]))


def context(anchors, positions, lengths=None, **fields) -> Context:
    lengths = [3] * len(anchors) if lengths is None else lengths
    return Context(torch.tensor(anchors), positions, lengths, fields.pop("nodes", max(lengths)), **fields)


def logits_alone(drafter, view, row, anchor, position, start=0):
    """Recomputed from scratch, one row, no cache."""
    ids = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    ids[0, 0] = anchor
    with torch.no_grad():
        out = drafter(
            inputs_embeds=drafter.embed(ids, view),
            features=states(row, position)[None, start:],
            feature_positions=torch.arange(start, position)[None],
            position_ids=torch.arange(position, position + ids.shape[1])[None],
        )
    logits = out.logits if drafter.config.own_head else view.head(out.last_hidden_state)
    return logits[0, drafter.config.first_slot :]


RULES = [("distance", False), ("anchor", True), ("query", True), ("unbounded", False)]


@pytest.mark.parametrize(("rule", "causal"), RULES)
def test_incremental_ragged_context_equals_recomputing(rule, causal, view):
    drafter = make_drafter(sliding_rule=rule, sliding_causal=causal)
    session = drafter.start(view, 3)
    reach = [5, 12, 1]
    session.observe(commit([(row, 0, stop) for row, stop in enumerate(reach)]))
    rows = [0, 1, 2]
    # Per round: how much each row grows, and whether a draft is asked for (pauses pile features up).
    for grow, asked in [((1, 4, 2), 1), ((0, 0, 3), 0), ((3, 1, 0), 0), ((70, 2, 1), 1), ((1, 1, 1), 1)]:
        before, reach = reach, [old + new for old, new in zip(reach, grow)]
        session.observe(commit([(row, a, b) for row, a, b in zip(rows, before, reach)]))
        if asked:
            got = session.propose(context([3, 4, 5], reach)).evidence.logits
            for b, row in enumerate(rows):
                want = logits_alone(drafter, view, row, 3 + b, reach[b])
                torch.testing.assert_close(got[b], want, atol=1e-4, rtol=0)
    # A row leaves and the others change places, with features waiting; then they go on.
    session.observe(commit([(row, reach[row], reach[row] + 1) for row in rows]))
    session.keep([2, 0])
    reach = [reach[2] + 1, reach[0] + 1]
    got = session.propose(context([5, 3], reach)).evidence.logits
    session.keep([1])
    session.observe(commit([(0, reach[1], reach[1] + 2)]))
    torch.testing.assert_close(got[0], logits_alone(drafter, view, 2, 5, reach[0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(got[1], logits_alone(drafter, view, 0, 3, reach[1]), atol=1e-4, rtol=0)
    got = session.propose(context([7], [reach[1] + 2])).evidence.logits
    torch.testing.assert_close(got[0], logits_alone(drafter, view, 0, 7, reach[1] + 2), atol=1e-4, rtol=0)


def test_a_pause_changes_nothing(view):
    drafter = make_drafter()
    steady, paused = drafter.start(view, 1), drafter.start(view, 1)
    for reach in range(4, 68):
        for session in (steady, paused):
            session.observe(commit([(0, reach - 4, reach)] if reach == 4 else [(0, reach - 1, reach)]))
        steady.propose(context([9], [reach]))
    ours, theirs = (session.propose(context([9], [reach])) for session in (paused, steady))
    torch.testing.assert_close(ours.evidence.logits, theirs.evidence.logits, atol=1e-4, rtol=0)
    assert torch.equal(ours.tokens, theirs.tokens)


def test_proposing_twice_gives_the_same_draft(view):
    session = make_drafter().start(view, 2)
    session.observe(commit([(0, 0, 6), (1, 0, 3)]))
    first, second = (session.propose(context([1, 2], [6, 3])) for _ in range(2))
    assert torch.equal(first.evidence.logits, second.evidence.logits)
    assert session.cache.counts == [6, 3]


def test_a_second_turn_starts_at_its_own_position(view):
    drafter = make_drafter()
    session = drafter.start(view, 2)
    session.observe(commit([(0, 20, 26), (1, 7, 9)]))
    got = session.propose(context([3, 4], [26, 9])).evidence.logits
    for b, (position, start) in enumerate([(26, 20), (9, 7)]):
        want = logits_alone(drafter, view, b, 3 + b, position, start)
        torch.testing.assert_close(got[b], want, atol=1e-4, rtol=0)
    moved = logits_alone(drafter, view, 0, 3, 26, 19)
    assert (got[0] - moved).abs().max() > 1e-3  # one more position of context is another law


def test_features_that_come_again_are_known_already(view):
    """A target cache that the user cut back makes the prefill read again what the session has heard of."""
    drafter = make_drafter()
    once, again = drafter.start(view, 3), drafter.start(view, 3)
    for session in (once, again):
        session.observe(commit([(0, 0, 9), (1, 2, 6), (2, 0, 3)]))
        session.propose(context([1, 2, 3], [9, 6, 3]))
        session.observe(commit([(0, 9, 10), (1, 6, 8), (2, 0, 0)]))  # waits for the next draft
    once.observe(commit([(0, 10, 12), (1, 0, 0), (2, 3, 7)]))
    again.observe(commit([(0, 4, 12), (1, 5, 8), (2, 3, 7)]))
    once.keep([2, 0]), again.keep([2, 0])
    for session in (once, again):
        session.observe(commit([(2, 7, 8), (0, 12, 13)] if session is once else [(2, 0, 8), (0, 11, 13)]))
    ours, theirs = (session.propose(context([3, 1], [8, 13])).evidence.logits for session in (again, once))
    assert again.cache.counts == once.cache.counts == [8, 13]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for b, (row, anchor, reach) in enumerate([(2, 3, 8), (0, 1, 13)]):
        torch.testing.assert_close(ours[b], logits_alone(drafter, view, row, anchor, reach), atol=1e-4, rtol=0)


def test_a_session_of_an_inference_mode_call_goes_on_outside(view):
    drafter = make_drafter()
    session = drafter.start(view, 1)
    with torch.inference_mode():
        session.observe(commit([(0, 0, 6)]))
        session.propose(context([1], [6]))
    for reach in (7, 8):  # the second time, the tensors are ordinary ones
        session.observe(commit([(0, reach - 1, reach)]))
        got = session.propose(context([1], [reach])).evidence.logits
        torch.testing.assert_close(got[0], logits_alone(drafter, view, 0, 1, reach), atol=1e-4, rtol=0)
    with torch.inference_mode():
        session.observe(commit([(0, 8, 9)]))
        assert session.propose(context([1], [9])).valid.all()


@pytest.mark.parametrize("tree_nodes", [0, 6])
@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("do_sample", [True, False])
def test_a_network_that_says_nan_changes_no_text(verification, do_sample, tree_nodes):
    """Nothing it drafts is a law; its tokens are ids all the same, and what comes out has the target's law."""
    target, copies = make_target(), 2000 if do_sample and not tree_nodes else 2
    drafter = make_drafter(verification=verification, tree_nodes=tree_nodes, policy="fixed")
    with torch.no_grad():
        drafter.lm_head.weight[5] = torch.nan
    settings = dict(do_sample=do_sample, max_new_tokens=4, temperature=1.5 if do_sample else None)
    settings |= dict(top_k=4, num_return_sequences=copies) if do_sample else {}
    ids, texts = torch.tensor([[1, 4, 2, 5]]), []
    for assistant in (None, drafter):
        torch.manual_seed(3)
        texts.append(target.generate(ids, assistant_model=assistant, **settings)[:, 4:])
    if not do_sample:
        assert torch.equal(*texts)
    elif not tree_nodes:
        counts = torch.stack([text[:, :3].flatten().bincount(minlength=64) for text in texts])
        assert chi2_contingency(counts[:, counts.sum(0) > 20].numpy()).pvalue > 1e-4


def test_a_row_without_features_is_drafted_from_its_anchor(view):
    drafter = make_drafter()
    session = drafter.start(view, 2)
    alone = drafter.start(view, 1).propose(context([6], [0]))
    assert alone.valid.all() and alone.evidence.logits.isfinite().all()
    session.observe(commit([(0, 0, 5), (1, 0, 0)]))
    both = session.propose(context([3, 6], [5, 0]))
    torch.testing.assert_close(both.evidence.logits[1], alone.evidence.logits[0], atol=1e-4, rtol=0)
    # Waiting features go when the rows they belong to leave.
    session = drafter.start(view, 2)
    session.observe(commit([(0, 0, 5), (1, 0, 0)]))
    session.keep([1])
    torch.testing.assert_close(session.propose(context([6], [0])).evidence.logits, alone.evidence.logits)


def test_lengths_cut_the_trained_block(view):
    session = make_drafter().start(view, 3)
    session.observe(commit([(row, 0, 8) for row in range(3)]))
    full = session.propose(context([1, 2, 3], [8, 8, 8], [9, 9, 9]))
    cut = session.propose(context([1, 2, 3], [8, 8, 8], [2, 0, 1]))
    assert full.shape == (3, 3) and cut.shape == (3, 2)
    assert cut.valid.tolist() == [[True, True], [False, False], [True, False]]
    assert torch.equal(cut.tokens[cut.valid], full.tokens[:, :2][cut.valid])
    assert session.propose(context([1, 2, 3], [8, 8, 8], [0, 0, 0])).shape == (3, 0)


def test_the_anchor_slot_drafts_where_it_was_trained_to(view):
    shifted, plain = (make_drafter(anchor_drafts=anchor) for anchor in (True, False))
    drafts = []
    for drafter in (shifted, plain):
        session = drafter.start(view, 1)
        session.observe(commit([(0, 0, 8)]))
        drafts.append(session.propose(context([1], [8], [4])))
    assert drafts[0].shape == (1, 4) and drafts[1].shape == (1, 3)
    assert torch.equal(drafts[0].tokens[:, 1:], drafts[1].tokens)


def seen(rule, causal, context_positions, window=4):
    config = BlockConfig.tiny(sliding_window=window, sliding_rule=rule, sliding_causal=causal)
    block = torch.tensor([[10, 11, 12]])
    keys = torch.tensor([[*context_positions]])
    mask = visible(config, "sliding_attention", block, keys)[0, 0]
    return [[p for p, ok in zip([*context_positions, 10, 11, 12], row) if ok] for row in mask.tolist()]


def test_windows_hide_what_their_trainers_hide():
    past = [5, 6, 7, 8, 9, -1]
    assert seen("unbounded", False, past) == [[5, 6, 7, 8, 9, 10, 11, 12]] * 3
    assert seen("distance", False, past) == [
        [6, 7, 8, 9, 10, 11, 12],
        [7, 8, 9, 10, 11, 12],
        [8, 9, 10, 11, 12],
    ]
    assert seen("distance", False, past, window=1) == [[9, 10, 11], [10, 11, 12], [11, 12]]
    assert seen("anchor", True, past) == [[6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 11], [6, 7, 8, 9, 10, 11, 12]]
    assert seen("anchor", False, past) == [[6, 7, 8, 9, 10, 11, 12]] * 3
    assert seen("query", True, past) == [[7, 8, 9, 10], [8, 9, 10, 11], [9, 10, 11, 12]]


@pytest.mark.parametrize("reduced", [True, False])
def test_sampling_draws_from_the_law_it_tells(reduced, view):
    # A padded head has 4 rows more than the target, which may never be drawn.
    drafter = make_drafter() if reduced else make_drafter(vocab_size=68, draft_vocab_size=None)
    copies = 4000
    session = drafter.start(view, 2 * copies)
    session.observe(commit([(0, 0, 8)] * copies + [(1, 0, 5)] * copies))

    def warp(scores):
        assert scores.shape[-1] == view.vocab_size
        scores = scores / 1.5
        return scores.masked_fill(scores < scores.topk(12).values[..., -1:], -torch.inf)

    torch.manual_seed(0)
    anchors, positions = [1] * copies + [2] * copies, [8] * copies + [5] * copies
    draft = session.propose(context(anchors, positions, do_sample=True, warp=warp))
    law, logits = draft.law, draft.evidence.logits
    assert law.rows.all() and draft.confidence_kind == "prior"
    torch.testing.assert_close(law.probs.sum(-1), torch.ones(2 * copies, 3))
    ids = drafter.draft_ids if reduced else torch.arange(64)
    dense = torch.full((2 * copies, 3, 64), -torch.inf).index_copy(-1, ids, logits)
    want = warp(dense).softmax(-1)
    for slot in range(3):
        law_at = law.at(torch.full((2 * copies,), slot), 64)
        torch.testing.assert_close(law_at, want[:, slot])
        for rows in (slice(copies), slice(copies, None)):
            frequency = draft.tokens[rows, slot].bincount(minlength=64) / copies
            expected = law_at[rows][0]
            assert (frequency - expected).abs().sum() / 2 < 0.04
            assert not frequency[expected == 0].any()


def test_a_warper_that_leaves_nothing_still_gets_an_exact_law(view):
    session = make_drafter().start(view, 1)
    session.observe(commit([(0, 0, 8)]))
    # Tokens 0 to 9 have no row in the reduced head.
    only = torch.full((64,), -torch.inf).index_fill(0, torch.arange(10), 0.0)
    draft = session.propose(context([1], [8], do_sample=True, warp=lambda scores: scores + only))
    torch.testing.assert_close(draft.law.probs, draft.evidence.logits.softmax(-1))


def test_greedy_and_switched_off_sampling_give_point_drafts(view):
    for drafter, do_sample in ((make_drafter(), False), (make_drafter(draft_sampling=False), True)):
        session = drafter.start(view, 1)
        session.observe(commit([(0, 0, 8)]))
        draft = session.propose(context([1], [8], do_sample=do_sample))
        assert draft.law is None and draft.is_chain
        assert torch.equal(draft.tokens, drafter.draft_ids[draft.evidence.logits.argmax(-1)])
        best = draft.evidence.logits.softmax(-1).amax(-1).cumprod(-1)
        torch.testing.assert_close(draft.confidence, best)


def test_trees_hold_the_likeliest_paths(view):
    drafter = make_drafter(tree_nodes=10)
    session = drafter.start(view, 2)
    session.observe(commit([(0, 0, 8), (1, 0, 5)]))
    request = dict(tree=True, nodes=10, do_sample=True)
    draft = session.propose(context([1, 2], [8, 5], [3, 1], **request))
    assert draft.law is None and not draft.is_chain and draft.valid.sum(1).tolist() == [10, 10]
    probs = torch.zeros(2, 3, 64).index_copy(-1, drafter.draft_ids, draft.evidence.logits.softmax(-1))
    for b, depth in enumerate([3, 1]):
        joint = probs[b, 0]
        paths = [joint]
        for slot in range(1, depth):
            joint = (joint[..., None] * probs[b, slot]).flatten()
            paths.append(joint)
        want = torch.cat(paths).topk(10).values
        torch.testing.assert_close(draft.confidence[b], want)
        for node in range(10):
            chance, at, depth_of = 1.0, node, []
            while at >= 0:
                depth_of.append(int(draft.tokens[b, at]))
                at = int(draft.parents[b, at])
            for slot, token in enumerate(reversed(depth_of)):
                chance *= probs[b, slot, token].item()
            assert chance == pytest.approx(draft.confidence[b, node].item(), rel=1e-4)
    chain = session.propose(context([1, 2], [8, 5], [3, 1]))
    assert chain.is_chain


def test_a_certain_tree_of_as_many_nodes_drafts_as_the_chain():
    """ddtree.md, check 2: the same text by the same rounds."""
    target, sizes = tiny_llama(vocab=5, seed=2), dict(vocab_size=5, mask_token_id=4, draft_vocab_size=None)
    drafter = make_drafter(**sizes, policy="fixed")
    # The best token of each slot has all of its probability.
    best = lambda logits: logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf)  # noqa: E731
    drafter.lm_head.register_forward_hook(lambda module, inputs, logits: best(logits))
    prompt, outs = torch.tensor([[1, 2, 3], [3, 1, 1]]), []
    for nodes in (0, drafter.config.num_drafts):
        drafter.config.tree_nodes = nodes
        settings = dict(max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
        outs.append(target.generate(prompt, assistant_model=drafter, **settings))
    chain, tree = outs
    assert torch.equal(chain.sequences, tree.sequences)
    assert chain.speculation.rounds == tree.speculation.rounds
    assert chain.speculation.accepted_by_depth == tree.speculation.accepted_by_depth
    assert 0 < chain.speculation.accepted < chain.speculation.verified


def test_borrowed_parts_come_from_the_target(view):
    drafter = make_drafter(own_embeddings=False, own_head=False, draft_vocab_size=None)
    session = drafter.start(view, 1)
    session.observe(commit([(0, 0, 8)]))
    draft = session.propose(context([1], [8]))
    want = logits_alone(drafter, view, 0, 1, 8)
    torch.testing.assert_close(draft.evidence.logits[0], want, atol=1e-4, rtol=0)
    assert not [key for key in drafter.state_dict() if "embed" in key or "head" in key]


def test_an_embedding_norm_is_left_out_where_the_drafter_was_trained_without():
    class Normed(torch.nn.Embedding):
        def __init__(self):
            super().__init__(64, 32)
            self.embed_norm = torch.nn.RMSNorm(32)

        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    target = make_target()
    target.set_input_embeddings(Normed())
    ids, view = torch.tensor([[1, 2]]), TargetView(target)
    for skip in (True, False):
        drafter = make_drafter(own_embeddings=False, skip_embed_norm=skip)
        table = target.get_input_embeddings()
        want = table.weight[ids] if skip else table(ids)
        torch.testing.assert_close(drafter.embed(ids, view), want)


@pytest.mark.parametrize("own", [True, False])
def test_saving_and_loading(own, tmp_path, view):
    drafter = make_drafter() if own else make_drafter(own_embeddings=False, own_head=False, draft_vocab_size=None)
    drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == {
        **drafter.config.to_dict(),
        "_name_or_path": str(tmp_path),
    }
    want = logits_alone(drafter, view, 0, 3, 7)
    for loader in (AutoDrafter, AutoModel, BlockDrafter):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is BlockDrafter and not loaded.training
        torch.testing.assert_close(logits_alone(loaded, view, 0, 3, 7), want, atol=0, rtol=0)
    model, info = BlockDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]


@pytest.mark.parametrize("loader", [AutoDrafter, AutoModel])
@pytest.mark.parametrize("key", ["lm_head.weight", "draft_ids", "norm.weight", "layers.1.self_attn.q_norm.weight"])
def test_a_missing_or_broken_tensor_is_refused_in_our_own_form(loader, key, tmp_path):
    from safetensors.torch import load_file, save_file

    make_drafter().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file({name: tensor for name, tensor in state.items() if name != key}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"missing: {key}"):
        loader.from_pretrained(tmp_path)
    if state[key].is_floating_point():
        save_file({**state, key: state[key] * torch.nan}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"not finite: {key}"):
            loader.from_pretrained(tmp_path)
    save_file({**state, "extra.weight": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="unexpected: extra.weight"):
        loader.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(block_size=1), "no slot"),
        (dict(num_assistant_tokens=4), "more than the 3 of max_stages 1"),
        (dict(target_layer_ids=[]), "target_layer_ids"),
        (dict(layer_types=["full_attention"]), "layer_types"),
        (dict(sliding_window=None), "sliding_window"),
        (dict(sliding_rule="left"), "sliding_rule"),
        (dict(own_head=False), "draft_vocab_size"),
        (dict(vocab_size=None), "vocab_size"),
        (dict(mask_token_id=64), "mask_token_id"),
        (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
    ],
)
def test_configs_that_make_no_drafter(fields, message):
    with pytest.raises(ValueError, match=message):
        BlockConfig.tiny(**fields)


BORROWS = dict(own_embeddings=False, own_head=False, draft_vocab_size=None)


@pytest.mark.parametrize(
    ("fields", "target", "message"),
    [
        ({}, dict(hidden_size=64), "hidden_size 32 but the target has 64"),
        ({}, dict(num_hidden_layers=1), "last"),
        (dict(target_layer_ids=[0, 4]), {}, "layer 4"),
        (dict(target_layer_ids=[0, 3]), {}, "final norm"),
        (dict(num_target_layers=6), {}, "target of 6 layers"),
        (dict(target_hidden_size=32, hidden_size=64, **BORROWS), {}, "borrows"),
        (dict(**BORROWS), dict(vocab_size=60), "mask_token_id 63"),
        ({}, dict(vocab_size=50), "proposes token 57"),
        (dict(vocab_size=512), {}, "vocabulary of 512"),
    ],
)
def test_targets_it_cannot_serve(fields, target, message):
    with pytest.raises(ValueError, match=message):
        make_drafter(**fields).check(TargetView(make_target(**target)))


def test_checks_pass_for_its_own_target(view):
    make_drafter().check(view)
    make_drafter(hidden_size=16, target_hidden_size=32).check(view)
    assert make_drafter().feature_layers == (-1, 0)


def test_anchors_beyond_its_own_embedding_are_masks(view):
    drafter = make_drafter(vocab_size=40, mask_token_id=39, draft_vocab_size=None)
    ids = torch.tensor([[63, 39]])
    embedded = drafter.embed(ids, view)
    assert torch.equal(embedded[0, 0], embedded[0, 1])
    session = drafter.start(view, 1)
    draft = session.propose(context([63], [0], do_sample=True))
    assert draft.tokens.max() < 40 and draft.law.ids is None


def test_bfloat16(view):
    drafter = make_drafter().to(torch.bfloat16)
    session = drafter.start(view, 2)
    session.observe(commit([(0, 0, 8), (1, 0, 5)]))
    session.observe(commit([(0, 8, 9), (1, 5, 8)]))
    draft = session.propose(context([1, 2], [9, 8], do_sample=True))
    assert draft.evidence.logits.isfinite().all()
    torch.testing.assert_close(draft.law.probs.sum(-1), torch.ones(2, 3))
    want = logits_alone(make_drafter(), view, 0, 1, 9)
    assert (draft.evidence.logits[0].float() - want).abs().max() < 0.1 * want.abs().max()


def test_the_cache_grows_by_doubling_and_keeps_its_zeros():
    cache = ContextCache(2)
    for step in range(40):
        new = torch.full((2, 1, 5, 4), float(step + 1))
        cache.extend(torch.arange(5 * step, 5 * step + 5).expand(2, 5), [5, 2])
        cache.write(0, new, -new)
    keys, values = cache.read(0)
    assert cache.counts == [200, 80] and keys.shape == (2, 1, 200, 4)
    assert torch.equal(keys[0, 0, :, 0], torch.arange(1, 41.0).repeat_interleave(5))
    assert torch.equal(values[1, 0, :80, 0], -torch.arange(1, 41.0).repeat_interleave(2))
    assert not keys[1, 0, 80:].any() and (cache.positions[1, 80:] == -1).all()


def test_lora(view):
    peft = pytest.importorskip("peft")
    drafter = make_drafter()
    before = logits_alone(drafter, view, 0, 3, 7)
    wrapped = peft.get_peft_model(drafter, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    session = wrapped.start(view, 1)
    session.observe(commit([(0, 0, 7)]))
    request = context([3], [7])
    assert isinstance(session, BlockSession)
    torch.testing.assert_close(session.propose(request).evidence.logits[0], before)
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    session = wrapped.start(view, 1)
    session.observe(commit([(0, 0, 7)]))
    assert (session.propose(request).evidence.logits[0] - before).abs().max() > 1e-3


def test_partial_rotary_turns_the_first_part_of_the_head_only(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    drafter = make_drafter(rope_parameters=rope)
    drafter.save_pretrained(tmp_path)
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    for model in (drafter, AutoDrafter.from_pretrained(tmp_path)):
        turned = rotate(x, model.rotary_emb(x, torch.tensor([[0, 1, 5]])))
        assert torch.equal(turned[..., 4:], x[..., 4:]) and torch.equal(turned[:, :, 0], x[:, :, 0])
        # Pairs (0, 2) and (1, 3) turn by 1 and 100 ** -0.5 radians per position.
        for pair, speed in ((0, 1.0), (1, 0.1)):
            angle = torch.tensor([0.0, 1.0, 5.0]) * speed
            want = x[..., pair] * angle.cos() - x[..., pair + 2] * angle.sin()
            torch.testing.assert_close(turned[..., pair], want)


def test_forward_trains_every_weight(view):
    drafter = make_drafter().train()
    out = drafter(
        input_ids=torch.tensor([[1, 63, 63, 63]] * 2),
        features=torch.stack([states(0, 6), states(1, 6)]),
        feature_positions=torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, -1, -1, -1]]),
        position_ids=torch.tensor([[6, 7, 8, 9], [3, 4, 5, 6]]),
        counts=[6, 3],
    )
    out.logits.square().sum().backward()
    assert not [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()]
    want = logits_alone(drafter, view, 1, 1, 3)
    torch.testing.assert_close(out.logits[1, 1:].detach(), want, atol=1e-4, rtol=0)
