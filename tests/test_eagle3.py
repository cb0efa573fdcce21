"""The EAGLE-3 family: its session against recomputing from scratch, its trees, its law, saving and loading."""

import math
from functools import cache

import pytest
import torch
from targets import padded, prompts
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import TopKLogitsWarper

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Session
from hf_specdraft.policies import Threshold

WIDTH = 64  # two layers' states of a target of hidden size 32
FORMS = {
    "llama": dict(num_hidden_layers=1, qk_norm=False, fc_norm=False, norm_output=False),
    "two layers": {},
    "norms": dict(norm_before_residual=True, norm_before_fc=True, fc_norm=False),
    "window": dict(token_window=3, token_residual=True),
    "borrowed": dict(own_embeddings=False, own_head=False, draft_vocab_size=None, num_hidden_layers=1),
}
each_form = pytest.mark.parametrize("form", FORMS)


@cache
def make_target(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **ids, "initializer_range": 0.5, **overrides})).eval()


def make_drafter(form: str = "two layers", **overrides) -> Eagle3Drafter:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(Eagle3Config.tiny(initializer_range=0.3, **{**FORMS[form], **overrides})).eval()
    if drafter.draft_ids is not None:
        drafter.draft_ids += 10
    for name, weight in drafter.named_parameters():
        if "norm" in name:  # a forgotten or swapped norm shows
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return drafter


@pytest.fixture(scope="module")
def view():
    return TargetView(make_target())


def text(row: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and states of an endless row."""
    generator = torch.Generator().manual_seed(row)
    return torch.randint(0, 64, (200,), generator=generator).tolist(), torch.randn(200, WIDTH, generator=generator)


def commit(spans: list[tuple[int, int, int]], first: bool = False) -> Commit:
    """What the loop tells when the anchors of (row, old, new) moved: all tokens up to it the first time."""
    hidden = torch.zeros(len(spans), max(new - old for _, old, new in spans), WIDTH)
    tokens = []
    for b, (row, old, new) in enumerate(spans):
        ids, states = text(row)
        hidden[b, : new - old] = states[old:new]
        tokens.append(ids[0 if first else old + 1 : new + 1] if new > old else [])
    return Commit(tokens, Features(hidden, [new - old for _, old, new in spans], [old for _, old, _ in spans]))


def context(rows: list[int], anchors: list[int], depth: int = 4, **fields) -> Context:
    tokens = torch.tensor([text(row)[0][anchor] for row, anchor in zip(rows, anchors)])
    lengths = fields.pop("lengths", [depth] * len(rows))
    return Context(tokens, anchors, lengths, fields.pop("nodes", depth), **fields)


def logits_alone(drafter, view, row: int, anchor: int, drafted: list[int], start: int = 0) -> torch.Tensor:
    """[1 + N, K] logits at the anchor and after each drafted token, from single passes without a cache, one row."""
    ids, states = text(row)
    window, state = drafter.config.token_window, None
    found, fed = [], ids[start + 1 : anchor + 1]
    for step in range(len(drafted) + 1):
        known = ids[: start + 1] + fed
        tokens = [[known[max(0, at - k)] for k in range(window)] for at in range(start + 1, len(known))]
        embeds = drafter.embed(torch.tensor([tokens]), view)
        true = drafter.fuse(states[None, start:anchor], embeds[:, : anchor - start])
        x = true if state is None else torch.cat((true, drafter.resume(state, embeds[:, anchor - start :])), dim=1)
        rope = drafter.rotary_emb(embeds, torch.arange(start, start + len(fed))[None])
        mask = torch.ones(len(fed), len(fed), dtype=torch.bool).tril()[None, None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafter, "resume", lambda given, _: given)  # x is the residual already
            out = drafter(embeds, rope, state=x, attention_mask=[mask] * len(drafter.layers))
        found.append(drafter.logits(view, out.last_hidden_state[0, -1]))
        # A row's own state goes on; those before it stay what they were.
        state = out.state[:, -1:] if state is None else torch.cat((state, out.state[:, -1:]), dim=1)
        fed = fed + drafted[step : step + 1]
    return torch.stack(found)


def assert_chain(drafter, view, session, rows, anchors, starts=None):
    draft = session.propose(context(rows, anchors))
    assert draft.is_chain and draft.valid.all()
    for b, (row, anchor) in enumerate(zip(rows, anchors)):
        tokens = draft.tokens[b].tolist()
        with torch.no_grad():
            want = logits_alone(drafter, view, row, anchor, tokens[:-1], starts[b] if starts else 0)
        assert drafter.target_ids(want.argmax(-1)).tolist() == tokens
        chance = want.log_softmax(-1).amax(-1).cumsum(0).exp()
        torch.testing.assert_close(draft.confidence[b], chance, atol=1e-4, rtol=1e-3)


# ---- the session ----


@each_form
def test_incremental_ragged_rows_equal_recomputing(form, view):
    drafter = make_drafter(form)
    session = drafter.start(view, 3)
    reach = [5, 12, 1]
    session.observe(commit([(row, 0, stop) for row, stop in enumerate(reach)], first=True))
    rows = [0, 1, 2]
    # Per round: how much each row grows, and whether a draft is asked for (pauses pile rows up).
    for grow, asked in [
        ((1, 4, 2), 1),
        ((0, 0, 3), 0),
        ((3, 1, 0), 0),
        ((70, 2, 1), 1),
        ((0, 5, 0), 1),
        ((1, 1, 1), 1),
    ]:
        before, reach = reach, [old + new for old, new in zip(reach, grow)]
        session.observe(commit([(row, a, b) for row, a, b in zip(rows, before, reach)]))
        if asked:
            assert_chain(drafter, view, session, rows, reach)
    # A row leaves and the others change places, with rows waiting; then they go on.
    session.observe(commit([(row, reach[row], reach[row] + 1) for row in rows]))
    session.keep([2, 0])
    reach = [reach[2] + 1, reach[0] + 1]
    assert_chain(drafter, view, session, [2, 0], reach)
    session.keep([1])
    assert_chain(drafter, view, session, [0], reach[1:])
    session.observe(commit([(0, reach[1], reach[1] + 2)]))
    assert_chain(drafter, view, session, [0], [reach[1] + 2])


def test_rows_of_equal_length(view):
    drafter = make_drafter("llama")
    session = drafter.start(view, 2)
    session.observe(commit([(0, 0, 6), (1, 0, 6)], first=True))
    assert_chain(drafter, view, session, [0, 1], [6, 6])
    session.observe(commit([(0, 6, 8), (1, 6, 8)]))
    assert_chain(drafter, view, session, [0, 1], [8, 8])


def test_a_second_turn_starts_at_its_own_position(view):
    drafter = make_drafter()
    session = drafter.start(view, 2)
    session.observe(commit([(0, 20, 26), (1, 7, 9)]))
    assert_chain(drafter, view, session, [0, 1], [26, 9], starts=[20, 7])


def test_an_unseen_anchor_waits_for_its_next_token(view):
    """A cache that is handed back feeds the last token of rows that ended early: its state comes before its next."""
    drafter = make_drafter()
    session = drafter.start(view, 1)
    session.observe(commit([(0, 0, 6)], first=True))
    ids, states = text(0)
    session.observe(Commit([[]], Features(states[None, 6:7], [1], [6])))
    session.observe(Commit([ids[7:11]], Features(states[None, 7:10], [3], [7])))
    assert_chain(drafter, view, session, [0], [10])


def test_a_prompt_of_embeddings_has_states_only(view):
    drafter = make_drafter()
    session = drafter.start(view, 1)
    ids, states = text(0)
    session.observe(Commit([ids[6:7]], Features(states[None, :6], [6], [0])))
    assert session.propose(context([0], [6])).shape == (1, 4)


def test_nothing_heard_is_no_draft(view):
    assert make_drafter().start(view, 2).propose(context([0, 1], [3, 4])).shape == (2, 0)


def test_proposing_twice_gives_the_same_draft(view):
    for fields in (dict(tree=False), dict(tree=True, nodes=6)):
        session = make_drafter(tree_nodes=6).start(view, 2)
        session.observe(commit([(0, 0, 6), (1, 0, 3)], first=True))
        first, second = (session.propose(context([0, 1], [6, 3], **fields)) for _ in range(2))
        assert torch.equal(first.tokens, second.tokens)
        torch.testing.assert_close(first.confidence, second.confidence)


def test_a_session_outlives_inference_mode(view):
    drafter = make_drafter()
    session = drafter.start(view, 1)
    with torch.inference_mode():
        session.observe(commit([(0, 0, 6)], first=True))
        session.propose(context([0], [6]))
    session.observe(commit([(0, 6, 8)]))
    assert_chain(drafter, view, session, [0], [8])


def test_drafting_stops_after_an_unsure_token(view):
    session = make_drafter().start(view, 2)
    session.observe(commit([(0, 0, 6), (1, 0, 3)], first=True))
    sure = session.propose(context([0, 1], [6, 3]))
    chances = sure.confidence / torch.nn.functional.pad(sure.confidence[:, :-1], (1, 0), value=1.0)
    threshold = float(chances.flatten().sort().values[3]) + 1e-6
    draft = session.propose(context([0, 1], [6, 3], more=Threshold(threshold).more))
    for b in range(2):
        unsure = (chances[b] < threshold).nonzero().flatten().tolist()
        want = unsure[0] + 1 if unsure else 4
        assert int(draft.valid[b].sum()) == want
        assert draft.tokens[b, :want].tolist() == sure.tokens[b, :want].tolist()
    assert draft.valid.sum() < 8


# ---- sampling ----


@pytest.mark.parametrize("form", ["two layers", "borrowed"])
def test_drawn_chains_come_with_the_law_they_were_drawn_from(form, view):
    drafter = make_drafter(form)
    session = drafter.start(view, 2)
    session.observe(commit([(0, 0, 6), (1, 0, 3)], first=True))
    warper = TopKLogitsWarper(7)
    draft = session.propose(context([0, 1], [6, 3], do_sample=True, warp=lambda scores: warper(None, scores)))
    assert draft.law.rows.all() and draft.confidence_kind == "pre"
    for b, anchor in enumerate([6, 3]):
        tokens = draft.tokens[b].tolist()
        with torch.no_grad():
            logits = logits_alone(drafter, view, b, anchor, tokens[:-1])
        want = warper(None, drafter.spread(view, logits)).softmax(-1)
        for node in range(4):
            law = draft.law.at(torch.tensor([node] * 2), 64)[b]
            torch.testing.assert_close(law, want[node], atol=1e-5, rtol=1e-3)
            assert law[tokens[node]] > 0


def test_draft_sampling_off_gives_point_chains(view):
    session = make_drafter(draft_sampling=False).start(view, 1)
    session.observe(commit([(0, 0, 6)], first=True))
    assert session.propose(context([0], [6], do_sample=True)).law is None


# ---- trees ----


def tree_of(drafter, view, anchors=(6, 3), depth=4, nodes=12, **fields):
    session = drafter.start(view, len(anchors))
    session.observe(commit([(b, 0, anchor) for b, anchor in enumerate(anchors)], first=True))
    return session.propose(context(list(range(len(anchors))), list(anchors), depth, nodes=nodes, tree=True, **fields))


def path_to(draft, b: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, int(draft.tokens[b, node]))
        node = int(draft.parents[b, node])
    return path


@each_form
def test_every_node_has_the_chance_of_its_own_path(form, view):
    drafter = make_drafter(form, tree_nodes=12)
    draft = tree_of(drafter, view)
    assert draft.shape == (2, 12) and draft.valid.all() and not draft.is_chain
    assert (draft.parents < torch.arange(12)).all() and draft.depth.max() > 2
    for b, anchor in enumerate((6, 3)):
        paths = [path_to(draft, b, node) for node in range(12)]
        assert len(set(map(tuple, paths))) == 12
        for node, path in enumerate(paths):
            with torch.no_grad():
                law = logits_alone(drafter, view, b, anchor, path[:-1]).log_softmax(-1)
            law = drafter.spread(view, law)
            chance = sum(float(law[step, token]) for step, token in enumerate(path))
            assert math.isclose(float(draft.confidence[b, node]), math.exp(chance), rel_tol=1e-3, abs_tol=1e-6)


def test_the_tree_holds_the_likeliest_paths(view):
    """With all tokens expanded, the best nodes of two levels are the best of all pairs."""
    drafter = make_drafter("llama", tree_nodes=12, tree_width=48)
    draft = tree_of(drafter, view, anchors=(6,), depth=2)
    with torch.no_grad():
        first = drafter.spread(view, logits_alone(drafter, view, 0, 6, []).log_softmax(-1))[0]
        chances = {(token,): first[token] for token in range(10, 58)}
        for token in range(10, 58):
            second = drafter.spread(view, logits_alone(drafter, view, 0, 6, [token]).log_softmax(-1))[1]
            chances |= {(token, other): first[token] + second[other] for other in range(10, 58)}
    best = sorted(chances, key=chances.get, reverse=True)[:12]
    assert {tuple(path_to(draft, 0, node)) for node in range(12)} == set(best)


def test_a_tree_of_width_one_is_the_chain(view):
    drafter = make_drafter(tree_nodes=4, tree_width=1)
    tree, chain = tree_of(drafter, view, nodes=4), tree_of(make_drafter(), view, nodes=4)
    assert torch.equal(tree.tokens, chain.tokens) and torch.equal(tree.depth, chain.depth)
    torch.testing.assert_close(tree.confidence, chain.confidence, atol=1e-5, rtol=1e-4)


def test_rows_go_no_deeper_than_asked(view):
    draft = tree_of(make_drafter(tree_nodes=12), view, lengths=[3, 0])
    assert draft.depth[0][draft.valid[0]].max() == 3 and not draft.valid[1].any()
    draft = tree_of(make_drafter(tree_nodes=12), view, lengths=[1, 2])
    assert int(draft.valid[0].sum()) == 3 and draft.depth[1][draft.valid[1]].max() == 2


def test_certain_tokens_keep_their_ancestors(view):
    """Exact ties: every node of the best path has the chance 1."""
    drafter = make_drafter(tree_nodes=3)
    drafter.lm_head.weight.data.mul_(1e4)
    draft = tree_of(drafter, view, nodes=3)
    assert (draft.confidence == 1).all() and torch.equal(draft.parents, torch.tensor([[-1, 0, 1]] * 2))


def test_a_network_that_says_nan_drafts_nothing(view):
    drafter = make_drafter(tree_nodes=6)
    drafter.lm_head.weight.data.fill_(math.nan)
    assert not tree_of(drafter, view, nodes=6).valid.any()


# ---- in generate ----


@pytest.mark.parametrize("tree_nodes", [0, 8], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)], ids=["batch1", "batch3"])
def test_greedy_output_is_plain_output(lengths, tree_nodes):
    """Reading the final state too, and accepting something: the drafter borrows and is initialised from the target."""
    target, inputs = make_target(), padded(prompts(lengths))
    fields = dict(tree_nodes=tree_nodes, policy="fixed", initializer_range=0.3)
    drafter = Eagle3Drafter(Eagle3Config.for_target(target.config, **fields)).eval().initialise_from(target)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    out = target.generate(
        **inputs, max_new_tokens=24, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation.verified > 0


# ---- config, check, weights ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(reads_final=True), "needs num_target_layers"),
        (dict(target_layer_ids=[]), "would read nothing"),
        (dict(norm_before_fc=True), "set one of them"),
        (dict(tree_width=0), "tree_width"),
        (dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "not supported"),
        (dict(own_head=False), "needs the drafter's own head"),
        (dict(block_size=4), "no field block_size"),
    ],
)
def test_configs_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config.tiny(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(target_hidden_size=48), "built for hidden_size 48 but the target has 32"),
        (dict(num_target_layers=6), "target of 6 layers but the target has 4"),
        (dict(target_layer_ids=[3]), "reads layer 3, the target's last"),
        (dict(hidden_size=64, own_embeddings=False), "borrows the embedding"),
        (dict(vocab_size=500), "vocabulary of 500"),
    ],
)
def test_targets_that_do_not_fit(fields, message, view):
    fields = dict(fields, **({"target_hidden_size": 32} if "hidden_size" in fields else {}))
    with pytest.raises(ValueError, match=message):
        make_drafter(**fields).check(view)


def test_the_final_state_is_the_last_feature(view):
    config = Eagle3Config.tiny(reads_final=True, num_target_layers=4)
    assert config.feature_layers == (-1, 0, 3)
    drafter = Eagle3Drafter(config)
    drafter.check(view)
    assert drafter.fc.in_features == 3 * 32


def test_initialised_drafters_start_from_what_the_target_knows():
    target = make_target.__wrapped__()  # one of its own: it is changed
    torch.nn.init.uniform_(target.model.norm.weight, 2.0, 4.0)
    fields = dict(own_embeddings=True, own_head=True, draft_vocab_size=9, target_layer_ids=[0, 1])
    drafter = Eagle3Drafter(Eagle3Config.for_target(target.config, **fields))
    ids = torch.arange(3, 30, 3)
    assert drafter.initialise_from(target, ids) is drafter
    assert torch.equal(drafter.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[ids]) and torch.equal(drafter.draft_ids, ids)
    with torch.no_grad():
        states = target(torch.arange(1, 21)[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[1], states[2], states[4]], dim=-1)
        fused = drafter.fuse(features, features)  # no token takes part in it
        # The final state as it is, up to its size, which is about the same everywhere.
        assert torch.nn.functional.cosine_similarity(fused, states[4], dim=-1).min() > 0.9999
        assert ((fused.norm(dim=-1) / states[4].norm(dim=-1)).log().abs() < 0.3).all()
        assert ((drafter.norm(fused).norm(dim=-1) / states[4].norm(dim=-1)).log().abs() < 0.3).all()


def test_a_saved_drafter_loads_as_it_was(tmp_path, view):
    drafter = make_drafter(reads_final=True, num_target_layers=4, target_layer_ids=[0])
    drafter.save_pretrained(tmp_path)
    for again in (AutoDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert isinstance(again, Eagle3Drafter) and again.config.feature_layers == (0, 3)
        assert isinstance(again.start(view, 1), Eagle3Session)
        states = again.state_dict()
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(tensor, states[name]), name
