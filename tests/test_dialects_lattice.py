"""DFlash 2 and LiLiCorr: what their own project computed with published layouts, and what must be refused."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from published import FIXTURES
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from hf_specdraft import AutoDrafter, BlockConfig
from hf_specdraft.correctors.lattice import after
from hf_specdraft.correctors.lilicorr import LiLiCorr
from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.drafters.block.convolutions import BlockConvolution
from hf_specdraft.training.records import FusedContext, Unrolled

KINDS = ("dflash2", "lilicorr")
close = partial(assert_close, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).eval()


def load(kind):
    drafter = AutoDrafter.from_pretrained(FIXTURES / kind / "drafter", policy="fixed").eval()
    return drafter, load_file(FIXTURES / kind / "golden.safetensors")


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("kind", KINDS)
def test_lattices_and_walks_equal_the_projects_own(kind, prompt, target):
    drafter, gold = load(kind)
    session = drafter.start(TargetView(target), 1)
    scale = drafter.corrector.logit_scale if kind == "lilicorr" else 1.0
    rounds = [key.removesuffix(".start") for key in gold if key.startswith(prompt) and key.endswith(".start")]
    assert len(rounds) == 3
    seen = 0
    for r in sorted(rounds):
        anchor = int(gold[f"{r}.anchor_position"])
        features = gold[f"{prompt}.features"][:, seen:anchor]
        session.observe(Commit([[0]], Features(features, [anchor - seen], [seen])))
        context = Context(gold[f"{prompt}.greedy_ids"][:, anchor], [anchor], [7], 7)
        with torch.no_grad():
            block = session.block_pass(context, slice(1, 8))
            state = drafter.corrector.begin(drafter, session.view, block)
        seen = anchor
        if kind == "dflash2":
            close(block.hidden, gold[f"{r}.block_hidden"][:, 1:])
        assert torch.equal(state.candidates.ids, gold[f"{r}.candidate_ids"])
        close(state.start, scale * gold[f"{r}.start"])
        close(state.pair, scale * gold[f"{r}.pair"])
        walk = gold[f"{r}.walk_index"]
        assert torch.equal(after(state.start, state.pair, walk[:, :-1]).argmax(-1), walk)


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_accepted_counts_equal_the_projects_own(kind, prompt, target):
    drafter, gold = load(kind)
    heard, start = [], drafter.start

    def listening(view, batch):
        session = start(view, batch)
        propose = session.propose

        def tell(context):
            draft = propose(context)
            heard.append((context.position[0], draft.tokens))
            return draft

        session.propose = tell
        return session

    drafter.start = listening
    ids, text = gold[f"{prompt}.input_ids"], gold[f"{prompt}.greedy_ids"]
    new = text.shape[1] - ids.shape[1] + 16  # so that no round of the fixture's is cut short
    out = target.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=drafter)
    assert torch.equal(out[:, : text.shape[1]], text)
    for r, accepted in enumerate(gold[f"{prompt}.accepted_drafts"].tolist()):
        position, tokens = heard[r]
        assert position == int(gold[f"{prompt}.round{r}.anchor_position"])
        assert torch.equal(tokens, gold[f"{prompt}.round{r}.draft_ids"])
        right = (tokens[0] == out[0, position + 1 :][: tokens.shape[1]]).long().cumprod(0).sum()
        assert int(right) == accepted


def test_convolution_of_three_taps_equals_the_projects_own():
    gold = load_file(FIXTURES / "dflash2" / "golden.safetensors")
    convolution = BlockConvolution(SimpleNamespace(hidden_size=64, block_size=5), taps=3, group_size=8)
    convolution.load_state_dict(load_file(FIXTURES / "dflash2" / "conv-3taps.safetensors"))
    seen = []

    def sublayer(x):
        seen.append(x)
        return gold["conv3.finish_in"]

    with torch.no_grad():
        close(convolution(gold["conv3.prepare_in"], sublayer), gold["conv3.finish_out"])
    close(seen[0], gold["conv3.prepare_out"])


@pytest.mark.parametrize("name", ["rand", "randwide"])
def test_lilicorr_heads_on_random_input_equal_the_projects_own(name):
    gold = load_file(FIXTURES / "lilicorr" / "golden.safetensors")
    if name == "rand":
        head = load("lilicorr")[0].corrector
    else:
        options = dict(top_k=3, num_layers=1, num_heads=2, mlp_ratio=1.5, factor_dim=24)
        head = LiLiCorr(BlockConfig(hidden_size=64, block_size=5), **options)
        weights = load_file(FIXTURES / "lilicorr" / "head-wide.safetensors")
        head.load_state_dict({key.removeprefix("lilicorr."): tensor for key, tensor in weights.items()})
    embed = AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).get_input_embeddings()
    part = {key: gold[f"{name}.{key}"].flatten(0, 1) for key in ("candidate_log_probs", "candidate_ids", "pass_hidden")}
    last, known = gold[f"{name}.anchor_hidden"].flatten(0, 2), gold[f"{name}.anchor_valid"].flatten()
    assert not known.all()
    sizes = [int(key.split(".k")[1].split(".")[0]) for key in gold if key.startswith(f"{name}.k") and "start" in key]
    for k in sizes:
        log_probs, ids = part["candidate_log_probs"][..., :k], part["candidate_ids"][..., :k]
        with torch.no_grad():
            start, pair = head.cosines(log_probs, embed(ids), part["pass_hidden"], last, known)
        close(start, gold[f"{name}.k{k}.start"].flatten(0, 1))
        close(pair, gold[f"{name}.k{k}.pair"].flatten(0, 1))
        assert max(start.abs().max(), pair.abs().max()) <= 1 + 1e-6
        walk = gold[f"{name}.k{k}.walk_index"].flatten(0, 1)
        assert torch.equal(after(start, pair, walk[:, :-1]).argmax(-1), walk)


def lilicorr_batch(target, drafter, gold):
    """(scored, labels, mask, teacher logits, block states with gradient) of the fixture's training batch."""
    view, rows = TargetView(target), gold["train.target_hidden"]
    states = gold["train.draft_hidden"].clone().requires_grad_()
    hidden = states.unflatten(1, (3, 8)).flatten(0, 1)[:, 1:]
    gold_ids = gold["train.target_ids"].flatten(0, 1)
    mask = gold["train.slot_mask"].flatten(0, 1).bool()
    positions = gold["train.anchor_positions"]
    anchors = (torch.arange(2)[:, None] * 40 + positions).flatten()
    place = torch.arange(40).expand(2, 40)
    context = FusedContext(drafter.hidden_norm(drafter.fc(rows)).detach(), torch.ones_like(place), place)
    unrolled = Unrolled(hidden, gold_ids[:, 1:], mask.long(), mask, anchors, gold_ids[:, :-1], context)
    scored = drafter.score(view, unrolled)
    at = (anchors[:, None] + torch.arange(7)).clamp(max=79)
    return scored, gold_ids[:, 1:].where(mask, -1), mask, gold["train.target_logits"].flatten(0, 1)[at], states


def test_lilicorr_losses_and_gradients_equal_the_projects_own(target):
    drafter, gold = load("lilicorr")
    names = ("ce", "margin", "penalty", "calibration")
    for setting in ("base", "margin", "cal"):
        scored, labels, mask, teacher, states = lilicorr_batch(target, drafter, gold)
        values = {name: scored.terms[f"lilicorr_{name}"](teacher, labels, mask) for name in names}
        forced = (values["ce"] > 0).sum()
        means = {name: value.sum() / forced for name, value in values.items()}
        for name, mean in means.items():
            close(mean, gold[f"train.terms.lilicorr_{name}"][0])
        loss = sum(weight * means[name] for weight, name in zip(gold[f"train.{setting}.weights"], names))
        close(loss, gold[f"train.{setting}.loss"][0])
        loss.backward()
        close(states.grad, gold[f"train.{setting}.grad_draft_hidden"])


def test_an_anchor_row_off_by_one_is_noticed(target):
    drafter, gold = load("lilicorr")
    recall = drafter.corrector.recall

    def late(unrolled):
        memory = recall(unrolled)
        memory.rows = unrolled.context.rows.flatten(0, 1)[unrolled.anchors]
        return memory

    drafter.corrector.recall = late
    scored, labels, mask, teacher, _ = lilicorr_batch(target, drafter, gold)
    value = scored.terms["lilicorr_ce"](teacher, labels, mask)
    assert abs(value.sum() / (value > 0).sum() - gold["train.terms.lilicorr_ce"][0]) > 1e-3


def test_selector_loss_equals_the_projects_own(target):
    drafter, gold = load("dflash2")
    drafter.corrector.force_gold = False
    mask = gold["train.weight_mask"].flatten(0, 1)[:, 1:].bool()
    previous, labels = (gold[f"train.{name}_ids"].flatten(0, 1)[:, 1:] for name in ("predecessor", "target"))
    hidden = gold["train.block_hidden"].flatten(0, 1)[:, 1:]
    unrolled = Unrolled(hidden, labels, mask.long(), mask, torch.arange(len(mask)), previous)
    scored = drafter.score(TargetView(target), unrolled)
    value = scored.terms["selector_ce"](None, labels.where(mask, -1), mask)
    held = value > 0
    close(value.sum() / held.sum(), gold["train.selector_loss"][0])
    close(held.sum() / mask.sum(), gold["train.selector_coverage"][0])
    close(((scored.chosen == labels) & held).sum() / held.sum(), gold["train.selector_accuracy"][0])


REFUSALS = {
    "lilicorr without scale": ("lilicorr", {"lilicorr_logit_scale": None}, {}, "logit_scale"),
    "lilicorr without eps": ("lilicorr", {"lilicorr_vector_eps": None}, {}, "vector_eps"),
    "lilicorr switched off": ("lilicorr", {"lilicorr_enabled": False}, {}, "lilicorr_enabled"),
    "lilicorr with half a convolution": ("lilicorr", {"conv_kernel_size": 2}, {}, "conv_group_size"),
    "lilicorr with a new setting": ("lilicorr", {"lilicorr_temperature": 2.0}, {}, "lilicorr_temperature"),
    "two kinds": (
        "lilicorr",
        {"projector_type": "dflash2"},
        {"architectures": ["LiLiCorrDraftModel"]},
        "projector_type",
    ),
    "selector without its rank": ("dflash2", {"selector_rank": None}, {}, "selector_rank"),
    "no convolution": ("dflash2", {"conv_kernel_size": None}, {}, "conv_kernel_size"),
    "scaled logits": ("dflash2", {"output_multiplier": 0.5}, {}, "output_multiplier"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals(refusal, tmp_path):
    kind, nested, top, message = REFUSALS[refusal]
    folder = shutil.copytree(FIXTURES / kind / "drafter", tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **top, "dflash_config": {**config["dflash_config"], **nested}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_drafter_is_saved_and_loaded_as_ours(kind, tmp_path):
    drafter, _ = load(kind)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert again.config.corrector == drafter.config.corrector
    assert again.config.convolution == drafter.config.convolution
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), drafter.state_dict().values()))
