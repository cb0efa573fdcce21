"""Published EAGLE-3 checkpoints: what their own projects computed with them, and what must be refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from published import FIXTURES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.eagle3 import Eagle3Drafter, unroll_eagle3
from hf_specdraft.drafters.eagle3.configuration_eagle3 import tapped_layers
from hf_specdraft.drafters.eagle3.dialects import dialect_of
from hf_specdraft.training.records import TrainingBatch

SAFEAILAB = "eagle3-safeailab/drafter"
DEEPSPEC = "eagle3-deepspec/drafter"
SPECULATORS = ["eagle3-speculators/drafter", "eagle3-speculators/drafter-norms"]
DRAFTERS = [SAFEAILAB, DEEPSPEC, *SPECULATORS]


def golden(name: str, prompt: str) -> dict[str, torch.Tensor]:
    folder, drafter = name.split("/")
    prefix = f"{prompt}." if name == SAFEAILAB else f"{drafter}.{prompt}."
    tensors = load_file(FIXTURES / folder / "golden.safetensors")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).eval()


def view_of(name: str, target) -> TargetView:
    if name != SAFEAILAB:
        return TargetView(target)
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=8, num_hidden_layers=8, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    embedding = load_file(FIXTURES / "eagle3-safeailab/golden.safetensors")["embedding"]
    model.get_input_embeddings().weight.data.copy_(embedding)
    return TargetView(model)


def states_of(drafter, monkeypatch) -> list[torch.Tensor]:
    """A list that grows by the last layer's output of every pass."""
    heard, finish = [], drafter.finish
    monkeypatch.setattr(drafter, "finish", lambda x: heard.append(x) or finish(x))
    return heard


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.flatten(0, -2), theirs.flatten(0, -2), atol=1e-4, rtol=0)


# ---- SafeAILab: trees ----


@pytest.mark.parametrize("prompt", "ab")
def test_trees_equal_the_projects_own(prompt, target, monkeypatch):
    gold, view = golden(SAFEAILAB, prompt), view_of(SAFEAILAB, target)
    drafter = AutoDrafter.from_pretrained(FIXTURES / SAFEAILAB, tree_nodes=19, tree_width=4)
    drafter.check(view)
    assert drafter.feature_layers == (1, 3, 4)
    session, known = drafter.start(view, 1), 0
    heard = states_of(drafter, monkeypatch)
    for r in range(4):
        tokens, states = gold[f"round{r}.sequence_ids"][0].tolist(), gold[f"round{r}.target_features"]
        anchor = len(tokens) - 1
        session.observe(Commit([tokens[known:]], Features(states, [states.shape[1]], [anchor - states.shape[1]])))
        known = len(tokens)
        heard.clear()
        draft = session.propose(Context(torch.tensor([tokens[-1]]), [anchor], [5], 19, tree=True))
        assert draft.tokens[0].tolist() == gold[f"round{r}.tree_tokens"][0, 1:].tolist()
        assert torch.equal(draft.lineage[0], gold[f"round{r}.tree_mask"][0, 0, 1:, 1:].bool())
        if r == 0:
            assert_same(heard[0], gold["round0.draft_hidden"][:, -1:])
            for level in range(1, 5):
                assert_same(heard[level], gold[f"round0.level{level}.draft_hidden"])


@pytest.mark.parametrize("prompt", "ab")
def test_the_chain_equals_the_projects_own(prompt, target):
    gold, view = golden(SAFEAILAB, prompt), view_of(SAFEAILAB, target)
    session = AutoDrafter.from_pretrained(FIXTURES / SAFEAILAB).start(view, 1)
    tokens, states = gold["round0.sequence_ids"][0].tolist(), gold["round0.target_features"]
    session.observe(Commit([tokens], Features(states, [states.shape[1]], [0])))
    draft = session.propose(Context(torch.tensor([tokens[-1]]), [len(tokens) - 1], [4], 4))
    assert draft.tokens.tolist() == gold["chain.ids"].tolist()


# ---- DeepSpec: rounds ----


def decode(target, drafter, prompt: list[int], rounds: int) -> tuple[list[int], list[list[int]], list[int]]:
    """Speculative decoding at its plainest, without a target cache: tokens, drafts and accepted counts per round."""
    session, count = drafter.start(TargetView(target), 1), drafter.config.num_assistant_tokens
    layers = [layer + 1 for layer in drafter.feature_layers]

    def run(ids):
        out = target(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[i] for i in layers], -1)

    choice, states = run(prompt)
    tokens = prompt + [choice[-1]]
    session.observe(Commit([list(tokens)], Features(states, [len(prompt)], [0])))
    drafts, accepted = [], []
    for _ in range(rounds):
        anchor = len(tokens) - 1
        draft = session.propose(Context(torch.tensor([tokens[-1]]), [anchor], [count], count))
        drafts.append(draft.tokens[0].tolist())
        choice, states = run(tokens + drafts[-1])
        choice = choice[anchor:]
        length = next((i for i, token in enumerate(drafts[-1]) if token != choice[i]), count)
        new = choice[: length + 1]
        tokens += new
        session.observe(Commit([new], Features(states[:, anchor : anchor + length + 1], [length + 1], [anchor])))
        accepted.append(length)
    return tokens, drafts, accepted


@pytest.mark.parametrize("prompt", "ab")
def test_drafts_acceptance_and_text_equal_deepspecs(prompt, target):
    drafter, gold = AutoDrafter.from_pretrained(FIXTURES / DEEPSPEC), golden(DEEPSPEC, prompt)
    want, output = gold["verify_ids"][:, 1:], gold["output_ids"][0].tolist()
    with torch.no_grad():
        tokens, drafts, accepted = decode(target, drafter, gold["input_ids"][0].tolist(), len(want))
    assert drafts == want.tolist()
    assert accepted == gold["accepted_drafts"].tolist()
    assert len(tokens) >= len(output) and tokens[: len(output)] == output


@pytest.mark.parametrize("prompt", "ab")
def test_the_states_of_every_pass_equal_deepspecs(prompt, target, monkeypatch):
    drafter, gold, view = AutoDrafter.from_pretrained(FIXTURES / DEEPSPEC), golden(DEEPSPEC, prompt), TargetView(target)
    session, heard, end = drafter.start(view, 1), states_of(drafter, monkeypatch), 0
    for call in range(7):
        ids = gold[f"call{call}.input_ids"][0].tolist()
        if f"call{call}.features" in gold:
            # Their rows of the first call are the prompt's without its first token, and the first new token.
            tokens = gold["input_ids"][0, :1].tolist() + ids if end == 0 else ids
            session.observe(Commit([tokens], Features(gold[f"call{call}.features"], [len(ids)], [end])))
            end += len(ids)
            heard.clear()
            session.propose(Context(torch.tensor(ids[-1:]), [end], [5], 5))
            states = iter(heard)
        theirs = gold[f"call{call}.hidden"][:, -1:]
        ours = next(states, None)
        if ours is not None:  # DeepSpec feeds the last draft as well
            assert_same(ours, theirs)


# ---- speculators: training ----


def eager_attend(queries, keys, values, seen, own):
    """Attention as the stored run had it, see the fixtures' README: a later step's rows are all seen, the own one by 1
    more in the score."""
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    bias = torch.cat([bias, *[torch.eye(queries.shape[2]).expand(*seen.shape[:2], -1, -1) for _ in own]], dim=-1)
    keys, values = (torch.cat([part, *[pair[i] for pair in own]], dim=2) for i, part in enumerate((keys, values)))
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("name", SPECULATORS)
def test_the_training_time_test_equals_speculators_own(name, prompt, target, monkeypatch):
    drafter, gold = AutoDrafter.from_pretrained(FIXTURES / name), golden(name, prompt)
    # One more token, so that the last row is an anchor, too; speculators feeds zeros behind the text.
    ids = torch.cat((gold["input_ids"][:, :1], gold["teacher.input_ids"], torch.zeros(1, 1, dtype=torch.long)), dim=1)
    batch = TrainingBatch(
        input_ids=ids,
        document_ids=torch.ones_like(ids),
        position_ids=torch.arange(ids.shape[1])[None],
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        features=torch.nn.functional.pad(gold["teacher.features"], (0, 0, 0, 2)),
    )
    monkeypatch.setattr(unroll_eagle3, "attend", eager_attend)
    with torch.no_grad():
        unrolled = drafter.unroll(TargetView(target), batch, steps=3, anchors=None)
        for step in range(3):
            want = drafter.norm(gold[f"teacher.step{step}.hidden"][0])
            torch.testing.assert_close(unrolled.hidden[:, step], want, atol=1e-4, rtol=0)


# ---- loading ----


@pytest.mark.parametrize("name", DRAFTERS)
def test_loaded_drafters_save_and_load_as_ours(name, target, tmp_path):
    drafter, view = AutoDrafter.from_pretrained(FIXTURES / name), view_of(name, target)
    drafter.check(view)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert isinstance(again, Eagle3Drafter) and again.feature_layers == drafter.feature_layers
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_tensor_acts(name, target):
    drafter, view = AutoDrafter.from_pretrained(FIXTURES / name), view_of(name, target)
    drafter.check(view)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 9, drafter.fc.in_features, generator=generator)
    ids = torch.randint(0, 512, (10,), generator=generator).tolist()

    def chance():
        session = drafter.start(view, 1)
        session.observe(Commit([ids], Features(states, [9], [0])))
        draft = session.propose(Context(torch.tensor(ids[-1:]), [9], [3], 3))
        return draft.confidence

    before = chance()
    for key, tensor in drafter.named_parameters():
        kept = tensor.data.clone()
        tensor.data.mul_(torch.rand(tensor.shape, generator=generator))  # norms would undo a common factor
        assert not torch.allclose(chance(), before, atol=1e-6), key
        tensor.data.copy_(kept)


def edited(tmp_path, name: str, config: dict | None = None, tensors: dict | None = None) -> Path:
    """A copy of a fixture with changed config keys and tensors (None: taken out)."""
    folder = tmp_path / "copy"
    shutil.copytree(FIXTURES / name, folder)
    for file, changes, load, save in (
        ("config.json", config, lambda p: json.loads(p.read_text()), lambda v, p: p.write_text(json.dumps(v))),
        ("model.safetensors", tensors, load_file, save_file),
    ):
        values = load(folder / file)
        values.update(changes or {})
        save({key: value for key, value in values.items() if value is not None}, folder / file)
    return folder


@pytest.mark.parametrize(
    ("name", "config", "tensors", "message"),
    [
        (SAFEAILAB, {"use_magic": True}, None, "keys this reader does not know: use_magic"),
        (SAFEAILAB, {"eagle_config": {"use_magic": True}}, None, "use_magic"),
        (SAFEAILAB, {"norm_output": False}, None, "norm_output"),
        (SAFEAILAB, None, {"d2t": None, "t2d": None}, "no 'd2t'"),
        (SAFEAILAB, None, {"extra.weight": torch.ones(1)}, "unexpected: extra.weight"),
        (SAFEAILAB, None, {"midlayer.hidden_norm.weight": None}, "missing: layers.0.hidden_norm.weight"),
        (DEEPSPEC, {"layer_types": ["sliding_attention"]}, None, "attend to everything"),
        (DEEPSPEC, {"draft_num_hidden_layers": 2}, None, "draft_num_hidden_layers"),
        (SPECULATORS[0], {"norm_before_residual": True, "fc_norm": True}, None, "missing: fc_norm.0.weight"),
    ],
)
def test_what_cannot_be_told_is_refused(name, config, tensors, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(edited(tmp_path, name, config, tensors))


def test_layer_ids_are_read_as_each_dialect_means_them(tmp_path):
    safeailab = edited(tmp_path / "a", SAFEAILAB, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}})
    assert AutoDrafter.from_pretrained(safeailab).feature_layers == (1, 2, 5)
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6]}
    trained = edited(tmp_path / "b", SPECULATORS[0], ids)
    assert AutoDrafter.from_pretrained(trained).feature_layers == (0, 2, 4)
    assert AutoDrafter.from_pretrained(FIXTURES / DEEPSPEC).feature_layers == (0, 1, 2, 3, 4)
    unnamed = edited(tmp_path / "c", SPECULATORS[0], {"eagle_aux_hidden_state_layer_ids": None})
    assert AutoDrafter.from_pretrained(unnamed, num_target_layers=8).feature_layers == (1, 3, 4)


def test_the_papers_layers_need_a_deep_enough_target(target):
    assert tapped_layers(32) == [1, 15, 28]
    with pytest.raises(ValueError, match="too shallow"):
        AutoDrafter.from_pretrained(FIXTURES / SAFEAILAB).check(TargetView(target))


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "safeailab"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "safeailab"),
        ({"architectures": ["LlamaForCausalLM"]}, None),
        ({"architectures": ["Qwen3Eagle3Model"], "ttt_length": 7}, "deepspec"),
        ({"speculators_model_type": "eagle3"}, "speculators"),
        ({"speculators_model_type": "eagle"}, None),
        ({}, None),
    ],
)
def test_dialects_are_recognised(config, dialect):
    assert dialect_of(config) == dialect
