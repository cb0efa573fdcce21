"""The prefix-attention head, with the convolutions and slot embeddings it was published with."""

from __future__ import annotations

import shutil

import pytest
import torch
from published import FIXTURES
from safetensors.torch import load_file
from targets import LENGTHS, NEW_TOKENS, padded, plain, prompts
from targets import target as tiny_target
from test_sampling_law import V, assert_fits
from test_trainer import make_target, rows
from test_trainer import trainer as make_trainer
from transformers import AutoModelForCausalLM

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import FusedContext, TrainingBatch, Unrolled

GOLDEN = load_file(FIXTURES / "prefix-attention" / "golden.safetensors")
SMALL = dict(name="prefix_attention", rank=8, heads=2, head_dim=8, mlp_hidden=16, top_k=6)
ROUNDS = [(prompt, r) for prompt in "ab" for r in range(2)]


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder():
    return FIXTURES / "prefix-attention" / "drafter"


@pytest.fixture(scope="module")
def drafter(folder):
    return AutoDrafter.from_pretrained(folder)


def close(ours, name):
    torch.testing.assert_close(ours, GOLDEN[name], atol=1e-4, rtol=0)


def heard(drafter, target, prompt, end, pieces=2):
    """A session that knows the features before `end`, in pieces; and the context to propose at it."""
    session = drafter.start(TargetView(target), 1)
    features, cuts = GOLDEN[f"{prompt}.features"], torch.linspace(0, end, pieces + 1).long().tolist()
    for start, stop in zip(cuts, cuts[1:]):
        session.observe(Commit([[0]], Features(features[:, start:stop], [stop - start], [start])))
        session.block_pass(context_at(prompt, stop), slice(None))  # reads it in
    return session, context_at(prompt, end)


def context_at(prompt, position):
    anchor = GOLDEN[f"{prompt}.greedy_ids"][:, position]
    return Context(anchor, [position], [7], 7)


@pytest.mark.parametrize(("prompt", "r"), ROUNDS)
def test_states_logits_and_scores_equal_the_projects_own(prompt, r, drafter, target):
    name, head, view = f"{prompt}.round{r}.", drafter.corrector, TargetView(target)
    session, context = heard(drafter, target, prompt, int(GOLDEN[name + "anchor_position"]))
    with torch.no_grad():
        block = session.block_pass(context, slice(0, 7))
        state = head.begin(drafter, view, block)
        latent = head.latent(
            head.codes(drafter, view, GOLDEN[name + "teacher_prev_ids"]), block.hidden, block.memory.read()
        )
        sure = drafter.confidence(drafter, view, block.hidden, GOLDEN[name + "teacher_prev_ids"])
    close(block.hidden, name + "block_hidden")
    close(block.logits, name + "base_logits")
    keys, values, _ = block.memory.read()
    close(keys, name + "head_keys")
    close(values, name + "head_values")
    assert torch.equal(state.candidates.ids[0], GOLDEN[name + "candidate_ids"])
    close(state.start[0], name + "start")
    close(state.pair[0], name + "pair")
    close(latent, name + "teacher_latent")
    close(block.logits + head.markov_w2(latent), name + "teacher_logits")
    close(sure, name + "teacher_confidence_logits")


@pytest.mark.parametrize(("prompt", "r"), ROUNDS)
def test_teaching_equals_the_projects_own(prompt, r, drafter, target):
    """All anchors of a text in one batch, behind another document."""
    name, view = f"{prompt}.round{r}.", TargetView(target)
    anchor, before = int(GOLDEN[name + "anchor_position"]), 5
    ids, features = GOLDEN[f"{prompt}.greedy_ids"], GOLDEN[f"{prompt}.features"]
    width = ids.shape[1]
    ids = torch.cat((ids[:, :before], ids), 1)
    features = torch.cat((features[:, -before:], features), 1)
    features = torch.nn.functional.pad(features, (0, 0, 0, ids.shape[1] - features.shape[1]))
    document = torch.tensor([[1] * before + [2] * width])
    places = torch.cat((torch.arange(before), torch.arange(width)))[None]
    batch = TrainingBatch(ids, document, places, document == 2, features)
    with torch.no_grad():
        unrolled = drafter.unroll(view, batch, anchors=None)
        part = slice(int((unrolled.anchors == anchor + before).nonzero()), None)
        scored = drafter.score(view, unrolled.at(part))
    assert torch.equal(unrolled.previous[part][:1], GOLDEN[name + "teacher_prev_ids"])
    close(scored.base[:1], name + "base_logits")
    close(scored.logits[:1], name + "teacher_logits")


@pytest.mark.parametrize(("side", "where"), [(0, "pre"), (1, "post")])
@pytest.mark.parametrize("place", ["attn", "mlp"])
def test_convolutions_equal_the_projects_own(place, side, where, drafter):
    conv = {"attn": drafter.layers[0].attention_conv, "mlp": drafter.layers[0].mlp_conv}[place]
    name = f"a.round0.conv.layer0.conv_{where}_{place}."
    x = GOLDEN[name + "in"]
    with torch.no_grad():
        dynamic = torch.nn.functional.linear(x, conv.kernel_projection.weight.chunk(2)[side])
        close(conv._convolve(x, dynamic, side), name + "out")


@pytest.mark.parametrize("prompt", "ab")
def test_drafts_acceptance_and_text_equal_the_projects_own(prompt, drafter, target):
    session, view = drafter.start(TargetView(target), 1), TargetView(target)
    ids, features = GOLDEN[f"{prompt}.greedy_ids"][0].tolist(), GOLDEN[f"{prompt}.features"]
    known = 0
    for r, accepted in enumerate(GOLDEN[f"{prompt}.accepted_drafts"].tolist()):
        name = f"{prompt}.round{r}."
        anchor = int(GOLDEN[name + "anchor_position"])
        session.observe(Commit([ids[known:anchor]], Features(features[:, known:anchor], [anchor - known], [known])))
        known = anchor
        draft = session.propose(context_at(prompt, anchor))
        assert draft.tokens[0].tolist() == GOLDEN[name + "draft_ids"].tolist()
        if name + "walk_index" in GOLDEN:
            walked = GOLDEN[name + "candidate_ids"].gather(1, GOLDEN[name + "walk_index"][:, None])[:, 0]
            assert torch.equal(draft.tokens[0], walked)
        right = [a == b for a, b in zip(draft.tokens[0].tolist(), ids[anchor + 1 :])]
        assert (right + [False]).index(False) == min(accepted, len(right))
    answer = target.generate(
        torch.tensor([ids[: view.vocab_size][: 7 if prompt == "a" else 33]]),
        max_new_tokens=40,
        do_sample=False,
        assistant_model=drafter,
    )
    assert answer[0].tolist()[: len(ids)] == ids[: answer.shape[1]]


def test_every_tensor_acts(folder, target):
    drafter = AutoDrafter.from_pretrained(folder)
    parts = [drafter.corrector, drafter.slot_embedding, *(layer.attention_conv for layer in drafter.layers)]

    def says():
        session, context = heard(drafter, target, "a", 12)
        with torch.no_grad():
            block = session.block_pass(context, slice(0, 7))
            state = drafter.corrector.begin(drafter, TargetView(target), block)
        return torch.cat((block.logits.flatten(), state.start.flatten(), state.pair.flatten()))

    before = says()
    for part in parts:
        for key, tensor in part.named_parameters():
            old = tensor.detach().clone()
            with torch.no_grad():
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
            assert (says() - before).abs().max() > 1e-3, key
            with torch.no_grad():
                tensor.copy_(old)


@pytest.mark.parametrize("changes", [{"markov_anchor_kv": True}, {"markov_gate_mode": "full"}], ids=str)
def test_arithmetic_we_do_not_have_is_refused(changes, folder, tmp_path):
    import json

    place = shutil.copytree(folder, tmp_path / "changed")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=next(iter(changes))):
        AutoDrafter.from_pretrained(place)


# The head by itself ---------------------------------------------------------------------------------------------------


def small(seed: int = 0, head: dict | None = None, **fields) -> BlockDrafter:
    """A drafter of tiny targets, whose head says more than its start."""
    torch.manual_seed(seed)
    values = dict(own_embeddings=False, own_head=False, draft_vocab_size=None, policy="fixed")
    values |= dict(corrector={**SMALL, "seed_std": 1.0, "out_scale": 1.0, **(head or {})}, slot_embed=True)
    values |= dict(convolution={"group_size": 8, "dynamic_from": "output"}, initializer_range=0.3)
    return BlockDrafter(BlockConfig.tiny(**{**values, **fields})).eval()


def test_without_its_last_layer_it_is_the_plain_drafter():
    model, head = tiny_target("llama"), small(head={"seed_std": 0.0})
    bare = BlockDrafter(BlockConfig.from_dict({**head.config.to_dict(), "corrector": None})).eval()
    bare.load_state_dict({k: v for k, v in head.state_dict().items() if not k.startswith("corrector.")})
    drafts = []
    for drafter in (head, bare):
        session = drafter.start(TargetView(model), 2)
        features = torch.randn(2, 5, drafter.fc.in_features, generator=torch.Generator().manual_seed(0))
        session.observe(Commit([[0], [0]], Features(features, [5, 3], [0, 0])))
        drafts.append(session.propose(Context(torch.tensor([4, 9]), [5, 3], [3, 3], 3)))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    # Bit for bit, the scores are the marginals' own.
    block = drafts[0].evidence
    state = head.corrector.begin(head, TargetView(model), block)
    assert torch.equal(state.pair[:, :, 3], block.logits.gather(-1, state.candidates.index)[:, 1:].float())


@pytest.mark.parametrize(
    ("corrector", "moves"),
    [(dict(SMALL, seed_std=1.0), True), ({"name": "markov", "rank": 8}, False)],
    ids=["prefix", "markov"],
)
def test_what_a_predecessor_changes_hangs_on_the_context(corrector, moves):
    """logits(v | a) - logits(w | a) less the same after b, in two contexts: one number for a plain Markov head."""
    drafter = small(corrector=corrector)
    if not moves:
        torch.nn.init.normal_(drafter.corrector.markov_w2.weight)
    view, anchors = TargetView(tiny_target("llama")), torch.tensor([5, 11])
    hidden = torch.randn(1, 1, 32).expand(2, -1, -1)
    context = FusedContext(torch.randn(1, 16, 32), torch.ones(1, 16).long(), torch.arange(16)[None])
    gaps = []
    for previous in (3, 4):
        ones = torch.ones(2, 1, dtype=torch.long)
        given = Unrolled(hidden, ones, ones, ones.bool(), anchors, previous=previous * ones, context=context)
        with torch.no_grad():
            logits = drafter.corrector.teach(drafter, view, given, torch.zeros(2, 1, 64)).logits[:, 0]
        gaps.append(logits[:, 20] - logits[:, 21])
    swap = gaps[0] - gaps[1]
    assert (swap.abs() > 1e-3).all()
    assert bool((swap[0] - swap[1]).abs() > 1e-3) == moves


def test_steps_equal_teaching_whatever_stands_beside():
    """The scores of walkers of a ragged batch are those of teaching along their own tokens, each row by itself."""
    model, drafter = tiny_target("llama"), small()
    view, counts = TargetView(model), [6, 0, 2]
    features = torch.randn(3, 6, drafter.fc.in_features)
    session = drafter.start(view, 3)
    session.observe(Commit([[0]] * 3, Features(features, counts, [0, 0, 0])))
    with torch.no_grad():
        block = session.block_pass(Context(torch.tensor([4, 9, 7]), counts, [3] * 3, 3), slice(1, 4))
        state = drafter.corrector.begin(drafter, view, block)
        previous, tokens, steps = block.anchor, [block.anchor], []
        for slot in range(3):
            scores, state = drafter.corrector.step(state, slot, previous)
            previous = scores.ids[:, slot + 1]  # any candidate
            tokens.append(previous)
            steps.append(scores)
        previous = torch.stack(tokens[:-1], 1)
        rows = torch.nn.functional.pad(drafter.fused(features), (0, 0, 0, 1))
        context = FusedContext(rows, torch.ones(3, 7).long(), torch.arange(7).expand(3, -1))
        anchors = torch.tensor([7 * row + count for row, count in enumerate(counts)])
        mask = torch.ones(3, 3, dtype=torch.bool)
        given = Unrolled(block.hidden, previous, previous, mask, anchors, previous=previous, context=context)
        taught = drafter.corrector.teach(drafter, view, given, block.logits).logits
    for slot, scores in enumerate(steps):
        torch.testing.assert_close(scores.logits, taught[:, slot].gather(1, scores.ids), atol=1e-4, rtol=1e-4)


def test_candidates_are_nominated_by_the_marginals():
    """The term is the marginals' cross entropy, over all tokens, with the target's law over its best two."""
    drafter, base, teacher = small(head={"nominate": 2}), torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    ones, context = torch.ones(1, 3, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)
    context = FusedContext(torch.randn(1, 9, 32), context, torch.arange(9)[None])
    given = Unrolled(torch.randn(1, 3, 32), ones, ones, ones.bool(), torch.tensor([5]), previous=ones, context=context)
    scored = drafter.corrector.teach(drafter, TargetView(tiny_target("llama")), given, base)
    law = torch.zeros(1, 3, 64)
    best = teacher.topk(2)
    law.scatter_(-1, best.indices, best.values.softmax(-1))
    want = -(law * base.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(scored.terms["nomination"](teacher, ones, ones.bool()), want)


@pytest.mark.parametrize("tree", [0, 8])
@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "gpt2"])
def test_greedy_output_is_plains(name, tree):
    fields = dict(own_embeddings=True, own_head=True, vocab_size=64, tree_nodes=tree)
    given = padded(prompts())
    out = tiny_target(name).generate(
        **given, assistant_model=small(**fields), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    width = given["input_ids"].shape[1]
    for row, length, answer in zip(out.tolist(), LENGTHS, plain(name)):
        assert row[width - length :] == answer


def test_sampled_output_has_the_targets_law():
    drafter = small(vocab_size=V, mask_token_id=V - 1, own_embeddings=True, own_head=True)
    assert_fits(drafter, "all_warpers")


LOSS = {"ce": 0.1, "tv": 1.8, "nomination": 0.1, "confidence": 1.0}


@pytest.mark.parametrize("train_only", [None, ["corrector", "confidence"]], ids=["joint", "head"])
def test_training_lowers_the_loss(train_only, tmp_path):
    model = make_target()
    fields = dict(vocab_size=model.config.vocab_size, confidence={"with_markov": True}, initializer_range=0.02)
    drafter = small(**fields)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    run = make_trainer(
        model,
        tmp_path,
        drafter,
        rows(8),
        DraftLoss(LOSS, weighting={"decay": {"gamma": 4}}, chunk_size=5),
        max_steps=12,
    )
    if train_only:
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad = name.startswith(tuple(train_only))
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    moved = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    expected = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert moved == expected
