"""Information floors: the estimators against specfloor's, identities, and measurements on tiny targets."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file
from scripted import byte_tokenizer
from targets import target
from typer.testing import CliRunner

from hf_specdraft import cli
from hf_specdraft.draft import Commit, Context, Draft, Features, Law
from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.evaluation import floors, rollouts
from hf_specdraft.evaluation.rollouts import Laws
from hf_specdraft.training.data import load, prepare
from hf_specdraft.verification import walk

GOLDEN = load_file(Path(__file__).parent / "fixtures" / "specfloor" / "golden.safetensors")
SETS = ("fork", "xor", "soft", "random")


def cells(name: str, order: int):
    """(slot, members cut to the top, dropped mass, weights, uncut members) of a golden set."""
    probs = GOLDEN[f"{name}.m{order}.probs"]
    for slot in range(order, 4):
        members = probs[:, slot] if order == 0 else probs[slot - 1]
        log_probs = GOLDEN[f"{name}.m1.predecessor_prob"][slot - 1].log() if order else members.new_zeros(len(members))
        cut = Laws.of(members.double().log(), int(GOLDEN[f"{name}.top_k"]))
        yield slot, cut.dense(), cut.residual, floors.importance(log_probs), members


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", SETS)
def test_floors_equal_specfloors(name, order):
    def gold(what, slot):
        return float(GOLDEN[f"{name}.m{order}.{what}"][slot])

    for slot, cut, dropped, weights, members in cells(name, order):
        close = dict(abs=1e-8)
        assert floors.floor(cut, weights) == pytest.approx(gold("T", slot), **close)
        shuffled = list(range(len(cut)))
        random.Random((200 if order else 100) + slot).shuffle(shuffled)
        split = floors.split_floor(cut, weights, torch.tensor(shuffled))
        assert split == pytest.approx(gold("T_split", slot), **close, nan_ok=True)
        assert float(dropped.mean()) == pytest.approx(gold("residual", slot), abs=1e-6)
        if order:
            assert floors.effective_size(weights) == pytest.approx(gold("ess", slot), rel=1e-8)
        else:
            assert floors.floor(members, weights) == pytest.approx(gold("T_untruncated", slot), **close)
            mixture = floors.total_variation(cut, cut.mean(0)).mean()
            assert float(mixture) == pytest.approx(gold("T_mixture_not_the_floor", slot), **close)
        if name != "random":
            assert floors.floor(members, weights) == pytest.approx(gold("T_known", slot), **close)


@pytest.mark.parametrize("members", [2, 5])
def test_barycentre_of_points_of_equals_and_of_anything(members):
    weights = torch.ones(members, dtype=torch.float64)
    points = torch.eye(members, 7, dtype=torch.float64)
    assert floors.floor(points, weights) == pytest.approx((members - 1) / members, abs=1e-12)
    law = torch.rand(1, 7, dtype=torch.float64).softmax(-1)
    assert floors.floor(law.expand(members, -1), weights) == pytest.approx(0, abs=1e-12)
    laws = (3 * torch.randn(members, 50, dtype=torch.float64)).softmax(-1)
    weights = torch.rand(members, dtype=torch.float64)
    q = floors.barycentre(laws, weights)
    assert float(q.sum()) == pytest.approx(1, abs=1e-9)
    least = floors.floor(laws, weights)
    for other in (laws.mean(0), *laws, (q + 0.1 * torch.rand(50)) / (q + 0.1).sum()):
        assert float((weights * floors.total_variation(laws, other / other.sum())).sum() / weights.sum()) >= least


def test_a_cell_of_one_member_has_no_floor():
    laws = torch.rand(3, 5, dtype=torch.float64).softmax(-1)
    assert math.isnan(floors.floor(laws, torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)))


def test_the_verifier_accepts_with_what_total_variation_leaves():
    p, q = torch.randn(2, 1, 12).mul(2).softmax(-1)
    count = 20000
    tokens = torch.multinomial(q[0], count, replacement=True)[:, None]
    law = Law(q.expand(count, 1, -1), None, torch.ones(count, dtype=torch.bool))
    draft = Draft.chain(tokens, [1] * count, law=law)
    verdict = walk(lambda index, alive: p.expand(count, -1), draft, torch.rand(count, 1), torch.rand(count), 12)
    left = 1 - float(floors.total_variation(p, q))
    assert float(verdict.length.float().mean()) == pytest.approx(left, abs=4 * (left * (1 - left) / count) ** 0.5)


def test_serving_counts_the_drafts_that_get_there():
    distances = torch.tensor([[0.5, 0.2], [0.1, 0.8]])
    factors = torch.tensor([[1.0, 0.3], [0.25, 0.3]])
    # The second rollout is only met a quarter as often at slot 1.
    expected = [0.3, (0.2 + 0.25 * 0.8) / 1.25]
    assert floors.serving_risk(distances, factors).tolist() == pytest.approx(expected)


def contexts(count: int = 3) -> list[torch.Tensor]:
    return list(torch.randint(1, 64, (count, 6), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "gpt2"])
def test_laws_along_rollouts_are_the_targets_own(name):
    model, (context,) = target(name), contexts(1)
    context = torch.cat((context, context))  # beyond the window
    rolled = rollouts.roll_out(model, context, 3, 4, 64)
    z = rolled.tokens
    for slot in range(4):
        forced = z.clone()
        forced[:, slot - 1] = z[-1, slot - 1]
        for laws, tokens in ((rolled.laws[slot], z), (rolled.forced[slot - 1] if slot else None, forced)):
            if laws is None:
                continue
            with torch.no_grad():
                logits = model(torch.cat((context.expand(4, -1), tokens[:, :slot]), 1)).logits[:, -2:].double()
            dense = torch.zeros(4, 64, dtype=torch.float64).scatter(1, laws.ids, laws.probs)
            torch.testing.assert_close(dense, logits[:, -1].softmax(-1), atol=1e-5, rtol=0)
        if slot:
            weight = logits[:, -2].log_softmax(-1)[:, z[-1, slot - 1]]
            torch.testing.assert_close(rolled.log_weights[slot - 1], weight, atol=1e-4, rtol=0)


def test_nothing_counts_behind_an_end():
    model, (context,) = target("llama"), contexts(1)
    rolled = rollouts.roll_out(model, context, 30, 4, 64, ends=range(32))
    for tokens, alive in zip(rolled.tokens.tolist(), rolled.alive.tolist()):
        assert alive == [all(token >= 32 for token in tokens[:k]) for k in range(4)]
    assert not rolled.alive.all()


def block_drafter(**fields) -> BlockDrafter:
    values = dict(own_embeddings=False, own_head=False, draft_vocab_size=None, **fields)
    return BlockDrafter(BlockConfig.tiny(**values)).eval()


def test_floors_of_a_target_and_a_drafter_above_them():
    model = target("llama")
    report = rollouts.measure(model, contexts(), block_drafter(), rollouts=24, slots=3, top_k=64)
    assert (report.anchors, report.order) == (3, 0)
    first, second, third = report.slots
    # Slot 0 knows everything, and so does slot 1 that sees its only predecessor.
    assert first.floor[0] == pytest.approx(0, abs=1e-9) and first.floor[1] is None
    assert second.floor[1] == pytest.approx(0, abs=1e-9) and 0.05 < second.floor[0]
    assert third.floor[1] < third.floor[0]
    for slot in report.slots:
        assert slot.gap == pytest.approx(slot.rejection - slot.floor[0]) and slot.gap >= 0
        assert slot.residual[0] == pytest.approx(0, abs=1e-9) and slot.serving is not None


def test_a_drafter_that_is_the_target_is_never_rejected():
    model = tiny_llama()
    report = rollouts.measure(model, contexts(2), AssistantDrafter.from_model(model), rollouts=4, slots=3, top_k=64)
    assert report.order is None
    for slot in report.slots:
        assert slot.rejection == pytest.approx(0, abs=1e-4) and slot.gap == pytest.approx(0, abs=1e-4)


def markov_drafter(rank: int = 8, **options) -> BlockDrafter:
    drafter = block_drafter(corrector={"name": "markov", "rank": rank, **options}, vocab_size=64)
    torch.nn.init.normal_(drafter.corrector.markov_w2.weight)
    return drafter


def eagle_drafter() -> Eagle3Drafter:
    return Eagle3Drafter(Eagle3Config.tiny()).eval()


@pytest.mark.parametrize("make", [block_drafter, markov_drafter, eagle_drafter])
def test_proposals_are_what_a_session_draws_from(make):
    model, (context,) = target("llama"), contexts(1)
    drafter = make()
    known = len(context) - 1
    with torch.no_grad():
        states = model(context[None], output_hidden_states=True).hidden_states
    hidden = torch.cat([states[layer + 1] for layer in drafter.feature_layers], -1)[:, :known]
    session = drafter.start(TargetView(model), 1)
    session.observe(Commit([context.tolist()], Features(hidden, [known], [0])))
    draft = session.propose(Context(context[-1:], [known], [3], 3, do_sample=True))
    laws = rollouts.Proposals(drafter, model, context, draft.tokens[0])(context, draft.tokens)
    for slot in range(draft.shape[1]):
        drawn = draft.law.at(torch.tensor([slot]), 64)
        torch.testing.assert_close(laws[:, slot], drawn, atol=1e-5, rtol=0)
    assert draft.shape[1] >= 2


@pytest.mark.parametrize(("options", "order"), [({}, 1), (dict(kind="rnn"), None)], ids=["vanilla", "rnn"])
def test_the_order_of_a_drafter_is_found(options, order):
    drafter = markov_drafter(**options)
    model, (context,) = target("llama"), contexts(1)
    rolled = rollouts.roll_out(model, context, 20, 3, 64)
    proposals = rollouts.Proposals(drafter, model, context, rolled.tokens[-1])
    assert proposals.order == order
    if order == 1:
        # The realised predecessor's own law, over the members of its cell, is no better than the barycentre.
        weights = floors.importance(rolled.log_weights[1][:-1])
        law = proposals(context, rolled.tokens[-1:])[:, 2].expand(len(rolled.tokens), -1)
        risk = rolled.forced[1].distance(law)[:-1]
        assert float((risk * weights).sum() / weights.sum()) >= rollouts._cell(rolled, 2, 1)[0]


def test_members_count_as_their_forced_predecessor_was_likely():
    model, (context,) = target("llama"), contexts(1)
    rolled = rollouts.roll_out(model, context, 8, 3, 64)
    members, weights = rolled.forced[1].dense()[:-1], rolled.log_weights[1][:-1].exp()
    floor, _, _, size = rollouts._cell(rolled, 2, 1)
    assert floor == pytest.approx(floors.floor(members, weights))
    assert size == pytest.approx(floors.effective_size(weights))
    assert abs(floor - floors.floor(members, torch.ones_like(weights))) > 1e-3


def test_a_gap_is_above_the_floor_of_the_drafters_own_order():
    """information-floors.md, check 5: a drafter that sees one token is not measured by what blind ones cannot avoid."""
    report = rollouts.measure(target("llama"), contexts(2), markov_drafter(), rollouts=16, slots=3, top_k=64)
    assert report.order == 1
    for slot, least in zip(report.slots, (0.0, report.slots[1].floor[1], report.slots[2].floor[1])):
        assert slot.gap == pytest.approx(slot.rejection - least) and slot.gap >= 0
    assert report.slots[2].floor[1] < report.slots[2].floor[0] - 0.01


def test_contexts_of_a_data_folder_end_in_anchors_of_its_held_out_texts(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    rows = [{"prompt": "say " + "abcdefgh"[i] * 9, "answer": f"well, {i * 111} it is"} for i in range(8)]
    prepare(rows, tokenizer, tmp_path / "data", held_out=0.5, mode={})
    _, held_out, _ = load(tmp_path / "data")
    found = list(rollouts.contexts_of_data(tmp_path / "data", 20))
    assert len(found) == len(held_out) > 0
    texts = [(row["input_ids"], row["loss_mask"]) for row in held_out]
    for context in found:
        ids, mask = next((ids, mask) for ids, mask in texts if ids[: len(context)] == context.tolist())
        assert mask[len(context) - 1] and mask[len(context)]


def test_the_command_measures_writes_and_draws(tmp_path):
    tiny_llama(vocab=256).save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    drafter = block_drafter(vocab_size=256, mask_token_id=255)
    drafter.save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "1", "category": "x", "turns": ["abcabc"]}) + "\n")
    arguments = ["floors", "--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--prompts", prompts]
    sizes = ["--rollouts", 4, "--anchors", 2, "--slots", 3, "--top-k", 32]
    files = ["--out", tmp_path / "floors.json", "--plot", tmp_path / "floors.png"]
    said = CliRunner().invoke(cli.app, [str(a) for a in (*arguments, *sizes, *files)])
    assert said.exit_code == 0, said.output
    assert "the drafter sees 0 of its tokens" in said.stdout
    written = json.loads((tmp_path / "floors.json").read_text())
    assert written["anchors"] == 2 and len(written["slots"]) == 3 and written["about"]["rollouts"] == 4
    assert (tmp_path / "floors.png").stat().st_size > 5000
    refused = CliRunner().invoke(cli.app, ["floors", "--target", "x"])
    assert isinstance(refused.exception, ValueError) and "either --prompts or --data" in str(refused.exception)
