"""AdaFlash: its length heads and losses against its own outputs, learning a length, and decoding with one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from published import FIXTURES
from safetensors.torch import load_file, save_file
from scripted import prompts
from test_trainer import make_drafter, make_target, rows

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.length_head import LengthHead, length_label, verified_length
from hf_specdraft.parts import Scored
from hf_specdraft.training.arguments import DraftTrainingArguments
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import Unrolled
from hf_specdraft.training.trainer import DraftTrainer

FOLDER = FIXTURES / "adaflash"
PUBLISHED = {"two_model": "thresh_head_two_model.", "subsequent": "thresh_head_subsequent."}


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "golden.safetensors")


def published_head(kind: str) -> LengthHead:
    head, prefix = LengthHead(SimpleNamespace(hidden_size=64), kind, 24), PUBLISHED[kind]
    state = load_file(FOLDER / "heads.safetensors")
    head.load_state_dict({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
    return head


def close(value, expected) -> None:
    torch.testing.assert_close(torch.as_tensor(value).reshape(expected.shape), expected, atol=1e-5, rtol=1e-5)


# Against AdaFlash's own outputs ---------------------------------------------------------------------------------------


def test_heads_give_the_published_shares_and_lengths(golden):
    with torch.no_grad():
        share = published_head("two_model")(golden["head.block_hidden"])
        close(share, golden["head.ratio"])
        close(published_head("subsequent")(golden["headsub.logits"]), golden["headsub.ratio"])
    for rate in (1.0, 1.3):
        for shortest in (1, 2):
            expected = golden[f"head.verify_len.rate{rate}.min{shortest}"]
            assert torch.equal(verified_length(share, 8, rate, shortest), expected)
    for shortest in (1, 2):
        expected = golden[f"lenrule.verify_len.rate1.0.min{shortest}"]
        assert torch.equal(verified_length(golden["lenrule.ratio"], 8, 1.0, shortest), expected), "halves go to even"


class Stored:
    """A drafter that says what the golden blocks hold, its slots those that draft."""

    draft_token_ids = None

    def __init__(self, golden, head: LengthHead | None = None):
        self.golden, self.head = golden, head
        self.matrix = load_file(FOLDER / "lm_head.safetensors")["lm_head.weight"]
        kept = golden["opd.block_keep_mask"]
        text, size = torch.arange(2)[:, None, None], golden["opd.input_ids"].shape[1]
        at = golden["opd.anchor_positions"][..., None] + torch.arange(8)
        inside = (at < size) & (torch.arange(8) > 0)
        clamped = at.clamp(max=size - 1)
        mask = inside & golden["opd.loss_mask"].bool()[text, clamped]
        self.blocks = golden["opd.draft_hidden"].view(2, 3, 8, 64)[kept].requires_grad_()
        self.unrolled = Unrolled(
            self.blocks[:, 1:],
            golden["opd.input_ids"][text, clamped][kept][:, 1:],
            (text * size + (at - 1).clamp(max=size - 1))[kept][:, 1:],
            mask[kept][:, 1:],
            anchors=(text[..., 0] * size + at[..., 0])[kept],
            blocks=self.blocks,
        )

    def unroll(self, view, batch):
        return self.unrolled

    def logits(self, view, hidden):
        return hidden @ self.matrix.T

    def score(self, view, unrolled):
        scored = Scored(self.logits(view, unrolled.hidden))
        if self.head is not None:
            self.head.teach(self, view, unrolled, scored)
        return scored


def adaflash_loss(golden, terms, head=None):
    drafter = Stored(golden, head)
    batch = SimpleNamespace(last_hidden=golden["opd.teacher_hidden"])
    loss = DraftLoss(terms, weighting={"decay": {"gamma": 7}})
    view = SimpleNamespace(vocab_size=512)
    return drafter, loss(drafter, view, batch, lambda states, ids: states @ drafter.matrix.T)["loss"]


@pytest.mark.parametrize("a, name", [(1.0, "a1"), (0.0, "a0"), (0.8, "a0.8")])
def test_distillation_loss_is_adaflashs(golden, a, name):
    terms = {"argmax_ce": a, "reverse_kl": 1 - a}
    close(adaflash_loss(golden, terms)[1].detach(), golden[f"opd.{name}.loss"])


def test_the_published_clip_is_of_the_mean(golden):
    drafter, loss = adaflash_loss(golden, {"argmax_ce": 0.8, "reverse_kl": {"weight": 0.2, "mean_clip": 0.01}})
    close(loss.detach(), golden["opd.a0.8.clip.loss"])
    (gradient,) = torch.autograd.grad(loss, drafter.blocks)
    close(gradient, golden["opd.a0.8.clip.grad_draft_hidden"].view(2, 3, 8, 64)[golden["opd.block_keep_mask"]])


@pytest.mark.parametrize("kind, name", [("two_model", "direct"), ("subsequent", "sub")])
def test_the_heads_loss_is_adaflashs(golden, kind, name):
    """On every block alike, whatever of it is masked (the published "subsequent" head takes the absolute error)."""
    drafter = Stored(golden, published_head(kind))
    with torch.no_grad():
        matches = drafter.logits(None, drafter.unrolled.hidden).argmax(-1) == drafter.unrolled.labels
        inputs = drafter.blocks if kind == "two_model" else drafter.logits(None, drafter.blocks)
        error = drafter.head(inputs) - length_label(matches)
    value = error.square() if kind == "two_model" else error.abs()
    close(value.mean(), golden[f"opd.len.{name}.head_loss"])


def test_the_term_leaves_the_drafter_alone(golden):
    head = published_head("two_model")
    drafter, loss = adaflash_loss(golden, "length", head)
    loss.backward()
    assert drafter.blocks.grad is None
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


# Learning -------------------------------------------------------------------------------------------------------------


def test_a_length_that_the_states_tell_is_learnt():
    """Accepted length is a function of the kind of prompt, and the states lean towards their kind: correlation above
    0.9 on blocks that were not seen."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randn(4, 16, generator=generator)
    lengths = torch.tensor([0, 2, 5, 7])

    def blocks(count):
        kind = torch.randint(4, (count,), generator=generator)
        hidden = kinds[kind][:, None] + 0.5 * torch.randn(count, 8, 16, generator=generator)
        return hidden, (torch.arange(7) < lengths[kind][:, None])

    torch.manual_seed(0)
    head = LengthHead(SimpleNamespace(hidden_size=16), bottleneck=16)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(120):
        hidden, matches = blocks(64)
        optimizer.zero_grad()
        (head(hidden) - length_label(matches)).square().mean().backward()
        optimizer.step()
    hidden, matches = blocks(256)
    with torch.no_grad():
        assert torch.corrcoef(torch.stack((head(hidden), length_label(matches))))[0, 1] > 0.9


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_head_trains_alone_in_the_trainer(kind, tmp_path):
    drafter = make_drafter(length_head={"kind": kind, "bottleneck": 8})
    drafter.requires_grad_(False)
    drafter.length_head.requires_grad_(True)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    args = DraftTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        learning_rate=2e-2,
        per_device_train_batch_size=4,
        report_to=[],
        logging_steps=5,
        save_strategy="no",
        unroll={"anchors": 8},
        use_cpu=True,
    )
    trainer = DraftTrainer(drafter, args, target=make_target(), loss=DraftLoss("length"), train_dataset=rows())
    trainer.train()
    losses = [entry["term_length"] for entry in trainer.state.log_history if "term_length" in entry]
    assert losses[-1] < 0.5 * losses[0]
    changed = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(name.startswith("length_head.") for name in changed)


def test_a_head_may_be_added_to_a_trained_drafter(tmp_path):
    drafter = make_drafter()
    grown = drafter.grown(length_head={"bottleneck": 8})
    grown.save_pretrained(tmp_path)
    again = BlockDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(p, dict(again.named_parameters())[name]) for name, p in grown.named_parameters())
    with pytest.raises(ValueError, match="width.*kind, bottleneck"):
        make_drafter(length_head={"width": 8})


# Decoding -------------------------------------------------------------------------------------------------------------


def drafter_with(bias: float, kind: str = "two_model", **fields) -> BlockDrafter:
    """Whose head says sigmoid(bias), whatever it reads."""
    torch.manual_seed(1)
    head = {"kind": kind, "bottleneck": 4}
    drafter = BlockDrafter(BlockConfig.tiny(length_head=head, policy="adaflash", **fields)).eval()
    last = drafter.length_head.out if kind == "two_model" else drafter.length_head.proj[2]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.fill_(bias)
    return drafter


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("bias", [30.0, -30.0, 0.0])
def test_output_is_plain_whatever_the_head_says(bias, kind):
    target, inputs = tiny_llama(), prompts(3)
    request = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    out = target.generate(**inputs, assistant_model=drafter_with(bias, kind), **request)
    assert torch.equal(out.sequences, target.generate(**inputs, **request).sequences)
    drafter = drafter_with(bias, kind)
    drafter.config.policy = "fixed"
    fixed = target.generate(**inputs, assistant_model=drafter, **request).speculation
    verified = {30.0: fixed.verified, -30.0: 0}.get(bias)
    assert (
        out.speculation.verified == verified if verified is not None else 0 < out.speculation.verified < fixed.verified
    )


def test_the_block_is_the_same_with_a_head():
    """A head reads; it changes nothing about what is drafted."""
    torch.manual_seed(1)
    plain = BlockDrafter(BlockConfig.tiny(policy="fixed")).eval()
    target, inputs = tiny_llama(), prompts(2)
    outs = []
    for drafter in (plain, plain.grown(length_head={"bottleneck": 4}).eval()):
        torch.manual_seed(3)
        outs.append(
            target.generate(**inputs, assistant_model=drafter, do_sample=True, temperature=4.0, max_new_tokens=24)
        )
    assert torch.equal(*outs)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_call_shows_the_head_whole_blocks_as_training_does(kind):
    """The anchor's slot and all others, however few tokens are to be drafted."""
    torch.manual_seed(1)
    drafter = BlockDrafter(BlockConfig.tiny(length_head={"kind": kind, "bottleneck": 4})).eval()
    torch.nn.init.normal_(drafter.length_head.out.weight if kind == "two_model" else drafter.length_head.proj[2].weight)
    view, shares = TargetView(tiny_llama()), []
    features = torch.randn(1, 6, 64)
    for length in (1, 3):
        session = drafter.start(view, 1)
        session.observe(Commit([[0] * 6], Features(features, [6], [0])))
        draft = session.propose(Context(torch.tensor([5]), [6], [length], length))
        shares.append(draft.evidence.share)
    ids, at = torch.tensor([[5, 63, 63, 63]]), torch.arange(6)[None]
    with torch.no_grad():
        hidden = drafter(ids, features, at, 6 + torch.arange(4)[None]).last_hidden_state
        torch.testing.assert_close(shares[1], drafter.length_head.share(drafter, view, hidden))
    torch.testing.assert_close(shares[0], shares[1])


def test_trees_have_no_one_length():
    drafter = drafter_with(0.0, tree_nodes=6)
    with pytest.raises(ValueError, match="tree_nodes"):
        tiny_llama().generate(**prompts(1), assistant_model=drafter, max_new_tokens=4)


# Published checkpoints ------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, kind: str, **settings) -> dict:
    """A DFlash checkpoint of z-lab's with a length head in AdaFlash's layout; returns the head's tensors."""
    source = FOLDER.parent / "dflash-zlab" / "drafter"
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    width = config["hidden_size"]
    state = LengthHead(SimpleNamespace(hidden_size=width), kind, 24).state_dict()
    settings = {f"use_thresh_head_{kind}": True, "thresh_head_direct_len": True, **settings}
    config["dflash_config"] = {**config["dflash_config"], "thresh_head_bottleneck_dim": 24, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        tensors | {PUBLISHED[kind] + name: tensor for name, tensor in state.items()}, folder / "model.safetensors"
    )
    return state


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_checkpoints_load_with_their_head(kind, tmp_path):
    state = checkpoint(tmp_path, kind)
    drafter = AutoDrafter.from_pretrained(tmp_path, sliding_rule="unbounded")
    assert drafter.config.length_head == {"kind": kind, "bottleneck": 24}
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.length_head.state_dict().items())


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"thresh_head_direct_len": False}, "thresh_head_direct_len"),
        ({"use_thresh_head_two_model": True, "use_thresh_head_subsequent": True}, "only one"),
    ],
)
def test_heads_that_tell_no_length_are_refused(settings, words, tmp_path):
    checkpoint(tmp_path, "two_model", **settings)
    with pytest.raises(ValueError, match=words):
        AutoDrafter.from_pretrained(tmp_path, sliding_rule="unbounded")
