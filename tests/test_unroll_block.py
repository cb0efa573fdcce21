"""Block unroll: in training every anchor's block sees and says what it sees and says in drafting."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from hf_specdraft import AutoDrafter, BlockConfig, BlockDrafter
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.drafters.block import BlockSession, unroll_block
from hf_specdraft.drafters.block.of_target import mask_token_for, tapped_layers
from hf_specdraft.training.anchors import choose_anchors
from hf_specdraft.training.features import LiveFeatures
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.training.simulation import simulated_tau

WIDTH = 64  # two layers' states of a target of hidden size 32


def make_target(**overrides):
    torch.manual_seed(1)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **ids, "initializer_range": 0.5, **overrides})).eval()


def make_drafter(**overrides):
    torch.manual_seed(0)
    return BlockDrafter(BlockConfig.tiny(initializer_range=0.2, **overrides)).eval()


@pytest.fixture(scope="module")
def view():
    return TargetView(make_target())


def document(seed: int, length: int, prompt: int):
    """(tokens, loss mask, features) of a random chat of one turn."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 60, (length,), generator=generator)
    return tokens, torch.arange(length) >= prompt, torch.randn(length, WIDTH, generator=generator)


def pack(rows: list[list[tuple]]) -> TrainingBatch:
    """Rows of documents -> a batch; what stands in padding must not matter, so it is anything."""
    width = max(sum(len(doc[0]) for doc in row) for row in rows)
    shape = len(rows), width
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


LONG, SHORT, OTHER = document(1, 21, 1), document(2, 9, 4), document(3, 13, 6)
RULES = [("distance", False), ("distance", True), ("anchor", True), ("query", True), ("unbounded", False)]


def in_drafting(drafter, view, doc, anchor):
    """The drafting slots' states [S, H] of one inference pass at position `anchor` of a document."""
    ids = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    ids[0, 0] = doc[0][anchor]
    out = drafter(
        inputs_embeds=drafter.embed(ids, view),
        features=doc[2][None, :anchor],
        feature_positions=torch.arange(anchor)[None],
        position_ids=torch.arange(anchor, anchor + ids.shape[1])[None],
    )
    return out.last_hidden_state[0, drafter.config.first_slot :]


@pytest.mark.parametrize("group", [8, 256])
@pytest.mark.parametrize("anchor_drafts", [False, True])
@pytest.mark.parametrize(("rule", "causal"), RULES)
def test_a_block_in_training_is_the_block_in_drafting(rule, causal, anchor_drafts, group, view, monkeypatch):
    monkeypatch.setattr(unroll_block, "GROUP", group)
    drafter = make_drafter(sliding_rule=rule, sliding_causal=causal, anchor_drafts=anchor_drafts)
    slots = drafter.config.num_drafts
    with torch.no_grad():
        unrolled = drafter.unroll(view, pack([[SHORT, LONG], [OTHER]]), anchors=None)
        want, labels, counts = [], [], []
        for doc in (SHORT, LONG, OTHER):
            for anchor in range(int(doc[1].int().argmax()), len(doc[0]) - 1):
                want.append(in_drafting(drafter, view, doc, anchor))
                labels.append(doc[0][anchor + 1 : anchor + 1 + slots].tolist())
                counts.append(len(labels[-1]))
    torch.testing.assert_close(unrolled.hidden, torch.stack(want), atol=1e-5, rtol=0)
    assert [row[mask].tolist() for row, mask in zip(unrolled.labels, unrolled.mask)] == labels
    assert torch.equal(unrolled.mask, torch.arange(slots) < torch.tensor(counts)[:, None])


def test_rows_point_at_the_target_row_about_the_same_token(view):
    batch = pack([[SHORT, LONG], [OTHER]])
    unrolled = make_drafter().unroll(view, batch, anchors=None)
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[unrolled.rows + 1][unrolled.mask], unrolled.labels[unrolled.mask])
    assert torch.equal(unrolled.rows[:, 0], unrolled.anchors)


def test_flex_attention_equals_sdpa(view):
    for rule, causal in RULES[1:4]:
        drafter = make_drafter(sliding_rule=rule, sliding_causal=causal)
        batch = pack([[SHORT, LONG], [OTHER]])
        with torch.no_grad():
            flex, sdpa = (drafter.unroll(view, batch, implementation=name).hidden for name in ("flex", "sdpa"))
        torch.testing.assert_close(flex, sdpa, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "causal"), RULES)
def test_compiled_flex_attention_gives_the_gradients_of_sdpa(rule, causal):
    target, batch = make_target().cuda(), pack([[SHORT, LONG], [OTHER]]).to(torch.device("cuda"))
    results = []
    for name in ("flex", "sdpa"):
        drafter = make_drafter(sliding_rule=rule, sliding_causal=causal, head_dim=16).cuda()
        hidden = drafter.unroll(TargetView(target), batch, implementation=name).hidden
        (hidden.square().sum() / len(hidden)).backward()
        results.append([hidden.detach(), *(w.grad for w in drafter.parameters() if w.grad is not None)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)  # TF32 inside the kernel


def cross_entropy(drafter, view, batch, **options):
    unrolled = drafter.unroll(view, batch, **options)
    logits = drafter.logits(view, unrolled.hidden)
    return F.cross_entropy(logits[unrolled.mask], unrolled.labels[unrolled.mask])


def test_packed_documents_train_as_they_do_apart(view):
    results = []
    for rows in ([[SHORT, LONG, OTHER]], [[SHORT], [LONG], [OTHER]], [[LONG], [OTHER, SHORT]]):
        drafter = make_drafter(draft_vocab_size=None).train()
        loss = cross_entropy(drafter, view, pack(rows), anchors=100)
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in drafter.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-6, rtol=1e-4)
    assert all(value.any() for value in results[0])


def test_a_block_hears_of_its_own_past_only(view):
    drafter = make_drafter()
    batch = pack([[SHORT, LONG], [OTHER]])
    batch.features.requires_grad_()
    unrolled = drafter.unroll(view, batch, anchors=None)
    width = batch.input_ids.shape[1]
    for number in (0, 3, 4, 14, len(unrolled.anchors) - 1):
        (gradient,) = torch.autograd.grad(unrolled.hidden[number].square().sum(), batch.features, retain_graph=True)
        row, column = divmod(int(unrolled.anchors[number]), width)
        past = torch.zeros(2, width, dtype=torch.bool)
        past[row, column - int(batch.position_ids[row, column]) : column] = True
        assert torch.equal(gradient.abs().sum(-1) > 0, past)
    # Another token at one column changes the block that stands there, and no other.
    for column in (SHORT[0].shape[0] + 8, 0):
        batch.input_ids[0, column] += 1
        changed = (drafter.unroll(view, batch, anchors=None).hidden - unrolled.hidden).abs().amax((1, 2)) > 0
        assert torch.equal(changed, unrolled.anchors == column)
        batch.input_ids[0, column] -= 1


def test_the_context_is_read_once(view):
    drafter, shapes = make_drafter(), []
    drafter.fc.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    drafter.unroll(view, pack([[SHORT, LONG], [OTHER]]), anchors=None)
    assert shapes == [(2, 30, 32)]


def test_supervised_pairs_are_those_that_decoding_meets(monkeypatch):
    """A row of 6 ids with the answer at 3..5, its last one the end token (SpecForge#885)."""
    target = make_target()
    ids = target.generate(torch.tensor([[9, 4, 31]]), max_new_tokens=3, do_sample=False)
    tokens, end = ids[0].tolist(), int(ids[0, 5])
    assert end not in tokens[:5]
    drafter = make_drafter(policy="fixed")
    met, propose = [], BlockSession.propose

    def spy(session, context):
        met.append((context.position[0], int(context.anchor)))
        return propose(session, context)

    monkeypatch.setattr(BlockSession, "propose", spy)
    out = target.generate(ids[:, :3], assistant_model=drafter, max_new_tokens=20, do_sample=False, eos_token_id=end)
    assert out[0].tolist() == tokens
    pairs = [(anchor, tokens[position + 1 :]) for position, anchor in met]

    batch = pack([[(ids[0], torch.arange(6) >= 3, torch.zeros(6, WIDTH))]])
    batch = LiveFeatures(target, drafter.feature_layers, law=False)(batch)
    batch.features.requires_grad_()
    unrolled = drafter.unroll(TargetView(target), batch)
    trained = [
        (tokens[anchor], labels[mask].tolist())
        for anchor, labels, mask in zip(unrolled.anchors.tolist(), unrolled.labels, unrolled.mask)
    ]
    print("supervised:", trained, "met in decoding:", pairs)
    assert trained == pairs == [(tokens[3], tokens[4:]), (tokens[4], tokens[5:])]
    unrolled.hidden.square().sum().backward()
    assert (batch.features.grad[0].abs().sum(-1) > 0).tolist() == [True, True, True, True, False, False]


def overfit(target, drafter, batch, steps: int, shift: int = 0) -> None:
    """`steps` steps on all anchors of a batch, its labels read `shift` columns late."""
    optimizer, view = torch.optim.Adam(drafter.parameters(), lr=3e-3), TargetView(target)
    for _ in range(steps):
        unrolled = drafter.unroll(view, batch, anchors=None)
        labels = batch.input_ids.flatten().roll(-shift)[unrolled.rows + 1]
        logits = drafter.logits(view, unrolled.hidden)
        loss = F.cross_entropy(logits[unrolled.mask], labels[unrolled.mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def decoded_and_simulated(target, drafter, batch, prompt: int) -> tuple[float, float]:
    """tau of decoding the text of a batch of one, and tau by the unroll."""
    ids, view = batch.input_ids, TargetView(target)
    out = target.generate(
        ids[:, :prompt],
        assistant_model=drafter.eval(),
        max_new_tokens=ids.shape[1] - prompt,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, ids)
    with torch.no_grad():
        unrolled = drafter.unroll(view, batch, anchors=None)
        best = drafter.logits(view, unrolled.hidden).argmax(-1)
    matches = (best == unrolled.labels) & unrolled.mask
    return out.speculation.tau, simulated_tau(matches, unrolled.anchors, batch)


def greedy_batch(target, drafter, prompt: int, length: int) -> TrainingBatch:
    torch.manual_seed(5)
    start = torch.randint(1, 60, (1, prompt))
    ids = target.generate(start, max_new_tokens=length - prompt, do_sample=False)
    batch = pack([[(ids[0], torch.arange(length) >= prompt, torch.zeros(length, WIDTH))]])
    return LiveFeatures(target, drafter.feature_layers, law=False)(batch)


BORROWS = dict(own_embeddings=False, own_head=False, draft_vocab_size=None, policy="fixed")


@pytest.mark.parametrize("anchor_drafts", [False, True])
def test_overfitting_one_text_is_accepted_in_decoding(anchor_drafts):
    """SpecForge#455: labels one off what decoding predicts train as well, and are not accepted."""
    target, prompt = make_target(), 4
    make = lambda: make_drafter(anchor_drafts=anchor_drafts, sliding_window=32, **BORROWS)  # noqa: E731
    drafter = make()
    batch = greedy_batch(target, drafter, prompt, 64)
    assert len(set(batch.input_ids[0].tolist())) > 20  # a text of one token would forgive any shift
    for steps in (0, 15, 185):
        overfit(target, drafter, batch, steps)
        decoded, simulated = decoded_and_simulated(target, drafter, batch, prompt)
        print(f"tau decoded {decoded:.3f}, simulated {simulated:.3f}")
        assert simulated == pytest.approx(decoded, rel=0.05)
    assert decoded - 1 >= 0.9 * drafter.config.num_drafts
    shifted = make()
    overfit(target, shifted, batch, 60, shift=1)
    decoded, _ = decoded_and_simulated(target, shifted, batch, prompt)
    assert decoded - 1 < 0.2 * drafter.config.num_drafts


def test_rotary_width_is_one_in_training_decoding_and_after_loading(tmp_path):
    torch.manual_seed(2)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GlmConfig(**sizes, num_key_value_heads=2, head_dim=16, rope_parameters=rope, pad_token_id=0)
    config.eos_token_id = None
    target = GlmForCausalLM(config).eval()
    widths = []

    def watch(model):
        model.rotary_emb.register_forward_hook(lambda module, inputs, output: widths.append(output[0].shape[-1]))
        return model

    watch(target.model)
    fields = dict(num_hidden_layers=2, block_size=4, mask_token_id=63, policy="fixed")
    drafter = watch(BlockDrafter(BlockConfig.for_target(config, **fields)))
    batch = LiveFeatures(target, drafter.feature_layers, law=False)(pack([[SHORT]]))
    before = drafter.unroll(TargetView(target), batch).hidden
    drafter.save_pretrained(tmp_path)
    loaded = watch(AutoDrafter.from_pretrained(tmp_path))
    torch.testing.assert_close(loaded.unroll(TargetView(target), batch).hidden, before)
    for model in (drafter, loaded):
        target.generate(SHORT[0][None], assistant_model=model, max_new_tokens=4, do_sample=False)
    assert len(widths) > 10 and set(widths) == {4}


def test_anchors_are_drawn_for_each_document_without_replacement():
    batch = pack([[SHORT, LONG], [OTHER]])
    everywhere = choose_anchors(batch)
    assert [int(everywhere[0, :9].sum()), int(everywhere[0, 9:].sum()), int(everywhere[1].sum())] == [4, 19, 6]
    generator = torch.Generator().manual_seed(3)
    times = torch.zeros(2, 30)
    for _ in range(400):
        chosen = choose_anchors(batch, 5, generator)
        assert not (chosen & ~everywhere).any()
        assert [int(chosen[0, :9].sum()), int(chosen[0, 9:].sum()), int(chosen[1].sum())] == [4, 5, 5]
        times += chosen
    share = times / 400
    assert (share[0, :9][everywhere[0, :9]] == 1).all()
    assert ((share[0, 9:][everywhere[0, 9:]] - 5 / 19).abs() < 0.1).all()  # 4.5 standard errors
    again = [choose_anchors(batch, 5, torch.Generator().manual_seed(8)) for _ in range(2)]
    assert torch.equal(*again)


def test_two_turns_have_no_anchor_across_the_question(view):
    tokens, _, features = LONG
    mask = torch.zeros(21, dtype=torch.bool)
    mask[3:6] = mask[7:10] = True
    unrolled = make_drafter().unroll(view, pack([[(tokens, mask, features)]]))
    assert unrolled.anchors.tolist() == [3, 4, 7, 8]
    # The draft at 4 ends with the turn, although its third slot stands in the next one.
    assert unrolled.mask.tolist() == [[True, True, False], [True, False, False]] * 2


def test_a_batch_without_anchors_still_has_a_gradient(view):
    """Ranks that wait for each other's gradients must not be left alone."""
    drafter = make_drafter()
    unrolled = drafter.unroll(view, pack([[document(4, 8, 7)]]))
    assert unrolled.hidden.shape == (0, 3, 32) and unrolled.labels.shape == (0, 3)
    unrolled.hidden.sum().backward()
    assert not drafter.fc.weight.grad.any()


def test_bad_options_are_refused(view):
    drafter, batch = make_drafter(), pack([[SHORT]])
    with pytest.raises(ValueError, match="features.*layers -1, 0"):
        drafter.unroll(view, TrainingBatch(batch.input_ids, batch.document_ids, batch.position_ids, batch.loss_mask))
    with pytest.raises(ValueError, match="implementation must be"):
        drafter.unroll(view, batch, implementation="fast")
    with pytest.raises(ValueError, match="anchors must be at least 1"):
        drafter.unroll(view, batch, anchors=0)
    with pytest.raises(ValueError, match="no gradient on the CPU"):
        drafter.unroll(view, batch, implementation="flex")


def test_tapped_layers_are_those_of_published_drafters():
    assert tapped_layers(36, 5) == [1, 9, 17, 25, 33]  # Qwen3-4B, Qwen3-8B
    assert tapped_layers(64, 5) == [1, 16, 31, 46, 61]  # Qwen3.6-27B
    assert tapped_layers(40, 5) == [1, 10, 19, 28, 37]  # Qwen3-14B
    assert tapped_layers(30, 1) == [15]
    for count in range(1, 8):
        for draft_layers in range(1, 6):
            layers = tapped_layers(count, draft_layers)
            assert layers and layers == sorted(set(layers)) and -1 <= layers[0] and layers[-1] <= count - 2


class Special(str):
    special = True


class Tokenizer(SimpleNamespace):
    """What the choice of a mask token reads of a tokenizer."""

    def __init__(self, length, specials=None, roles=(), **fields):
        added = {id: Special(name) for id, name in (specials or {}).items()}
        super().__init__(length=length, added_tokens_decoder=added, all_special_ids=list(roles), **fields)

    def __len__(self):
        return self.length


def test_the_mask_token_is_one_no_text_holds():
    specials = {0: "<|end|>", 1: "<|im_start|>", 2: "<|tool|>", 3: "<|reserved_0|>", 4: "<|reserved_1|>"}
    assert mask_token_for(Tokenizer(60, mask_token_id=4), 64) == 4
    assert mask_token_for(Tokenizer(60, specials), 64) == 60  # as Qwen3's drafters
    assert mask_token_for(Tokenizer(64, specials, roles=[0], chat_template="<|im_start|>"), 64) == 4
    assert mask_token_for(Tokenizer(64, specials, roles=[0, 4, 3], chat_template="<|im_start|>"), 64) == 2
    with pytest.raises(ValueError, match="give mask_token_id"):
        mask_token_for(Tokenizer(64, specials, roles=[0, 2, 3, 4], chat_template="<|im_start|>"), 64)
    with pytest.raises(ValueError, match="give it, or the target's tokenizer"):
        BlockConfig.for_target(make_target().config)


def test_a_new_drafter_takes_its_widths_from_the_target():
    target = make_target(num_key_value_heads=2)
    config = BlockConfig.for_target(target.config, Tokenizer(60), num_hidden_layers=2, block_size=8)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (32, 2, 8)
    assert (config.mask_token_id, config.target_layer_ids, config.num_drafts) == (60, [1], 7)
    BlockDrafter(config).check(TargetView(target))


def test_rotary_angles_that_depend_on_the_length_are_not_taken_over():
    sizes = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, num_hidden_layers=8)
    longrope = {"rope_type": "longrope", "rope_theta": 500.0, "long_factor": [1.0], "short_factor": [1.0]}
    by_layer = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 70.0, "factor": 2.0},
    }
    for given, want in (
        (longrope, {"rope_type": "default", "rope_theta": 500.0}),
        (by_layer, by_layer["full_attention"]),
        (None, {"rope_type": "default", "rope_theta": 10000.0}),
    ):
        text = PreTrainedConfig(**sizes)
        text.rope_parameters = given
        config = BlockConfig.for_target(text, mask_token_id=0, num_hidden_layers=2)
        assert {key: config.rope_parameters[key] for key in want} == want
        assert config.rope_parameters["rope_type"] == want["rope_type"]
