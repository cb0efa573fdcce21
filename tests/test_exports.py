"""Drafters in other projects' formats: the files are those projects' own, the drafter read back is the same one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file
from test_dialects import FIXTURES, decode, golden
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdraft.cli import app
from hf_specdraft.drafters import AutoDrafter, Drafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.block import exports as block_exports
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter
from hf_specdraft.publishing import export, export_dialects

FORMATS = {
    "dflash-zlab/drafter": "zlab",
    "dflash-transformers/drafter": "transformers",
    "dflash-transformers/drafter-sliding": "transformers",
    "dflash-deepspec/drafter": "deepspec",
    "dflash-speculators/drafter": "speculators",
    "dflash-speculators/drafter-converted": "speculators",
}


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).eval()


def tensors(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_tensors(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


def network(drafter: Drafter) -> dict:
    """A drafter's config without what only says how to draft or where it comes from."""
    config = drafter.config.to_dict()
    told = {"num_target_layers", "target_name", "initializer_range", "_name_or_path", "auto_map"}
    told |= {"dtype", "architectures", "skip_embed_norm", "bos_token_id", "eos_token_id", "pad_token_id"}
    if "sliding_attention" not in config["layer_types"]:
        told |= {"sliding_window", "sliding_rule", "sliding_causal"}
    if not drafter.config.own_head:
        told |= {"vocab_size"}
    return {key: value for key, value in config.items() if key not in told}


def block(**fields) -> BlockDrafter:
    """A drafter for `dflash-target` that borrows its embedding and head, unless `fields` say otherwise."""
    values = dict(
        vocab_size=512,
        hidden_size=64,
        target_layer_ids=[-1, 1, 4],
        mask_token_id=511,
        own_embeddings=False,
        own_head=False,
        draft_vocab_size=None,
        layer_types=None,
        sliding_window=None,
    )
    torch.manual_seed(1)
    return BlockDrafter(BlockConfig.tiny(**{**values, **fields})).eval()


@pytest.mark.parametrize("name", FORMATS)
def test_writes_the_files_their_own_project_wrote(name, tmp_path):
    drafter = AutoDrafter.from_pretrained(FIXTURES / name)
    export(drafter, FORMATS[name], tmp_path / "out")
    assert_same_tensors(tensors(tmp_path / "out"), tensors(FIXTURES / name))
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", FIXTURES / name))
    # Told apart from what computes: provenance, training, and defaults of the class that wrote it.
    for config in (ours, theirs):
        for part in (config, config.get("transformer_layer_config", {})):
            for key in ("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "model_type", "dtype"):
                part.pop(key, None)
        config.pop("speculators_version", None)
        config.get("speculators_config", {}).get("verifier", {}).pop("architectures", None)
        if not any(t == "sliding_attention" for t in config.get("layer_types", ())):
            config.pop("sliding_window", None)
    shared = {key: theirs[key] for key in ours if key in theirs}
    assert shared.pop("transformer_layer_config", {}).items() >= ours.pop("transformer_layer_config", {}).items() or (
        name.startswith("dflash-speculators")
    )
    unequal = {key for key, value in shared.items() if ours[key] != value}
    # The fixture says that layers slide or not as its trainer builds them.
    assert unequal <= {"sliding_window_non_causal"}
    assert "speculators_config" not in theirs or ours["speculators_config"] == theirs["speculators_config"]


@pytest.mark.parametrize("name, dialect", [*FORMATS.items(), ("dflash-zlab/drafter", "specforge")])
def test_round_trip_gives_the_same_drafter(name, dialect, tmp_path, target):
    drafter, gold = AutoDrafter.from_pretrained(FIXTURES / name), golden(name, "a")
    export(drafter, dialect, tmp_path / "out")
    again = AutoDrafter.from_pretrained(tmp_path / "out")
    assert network(again) == network(drafter)
    assert_same_tensors(again.state_dict(), drafter.state_dict())
    with torch.no_grad():
        _, drafts, _ = decode(target, again, gold["prompt"].tolist(), 3)
    assert drafts == gold["draft_ids"].tolist()[:3]


@pytest.mark.parametrize(
    "dialect, fields",
    [
        ("zlab", dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9, sliding_rule="unbounded")),
        (
            "specforge",
            dict(
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=9,
                sliding_rule="query",
                sliding_causal=True,
            ),
        ),
        ("transformers", dict(layer_types=["full_attention", "sliding_attention"], sliding_window=9)),
        ("zlab", dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6})),
        ("specforge", dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})),
        ("zlab", dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})),
        ("specforge", dict(attention_bias=True, dtype="bfloat16")),
        ("deepspec", dict(own_embeddings=True, own_head=True, anchor_drafts=True)),
        (
            "speculators",
            dict(
                own_embeddings=True,
                own_head=True,
                draft_vocab_size=320,
                hidden_size=32,
                target_hidden_size=64,
                anchor_drafts=True,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=9,
                sliding_rule="anchor",
                sliding_causal=False,
            ),
        ),
    ],
)
def test_round_trip_of_what_fixtures_lack(dialect, fields, tmp_path):
    dtype = getattr(torch, fields.pop("dtype", "float32"))
    drafter = block(**fields).to(dtype)
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(torch.randperm(512)[:320].sort().values)
    export(drafter, dialect, tmp_path / "out")
    again = AutoDrafter.from_pretrained(tmp_path / "out")
    assert again.dtype == dtype
    assert network(again) == network(drafter)
    assert_same_tensors(again.state_dict(), drafter.state_dict())
    assert torch.equal(again.rotary_emb.inv_freq, BlockDrafter(drafter.config).rotary_emb.inv_freq)


def test_copies_of_the_target_equal_the_projects_own_converter(tmp_path, target):
    drafter = AutoDrafter.from_pretrained(FIXTURES / "dflash-zlab/drafter")
    lost = export(drafter, "speculators", tmp_path / "out", target)
    assert_same_tensors(tensors(tmp_path / "out"), tensors(FIXTURES / "dflash-speculators/drafter-converted"))
    assert lost == ["num_target_layers", "target_name"]  # the name is new there: the target's own folder
    gold = golden("dflash-zlab/drafter", "a")
    with torch.no_grad():
        _, drafts, _ = decode(target, AutoDrafter.from_pretrained(tmp_path / "out"), gold["prompt"].tolist(), 3)
    assert drafts == gold["draft_ids"].tolist()[:3]
    assert not drafter.config.own_head  # the drafter itself stays as it was


def test_an_embedding_that_scales_is_copied_as_it_acts(tmp_path):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=64)
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=16)).eval()
    drafter = block(vocab_size=64, hidden_size=32, target_layer_ids=[0, 1], mask_token_id=63)
    export(drafter, "speculators", tmp_path / "out", gemma)
    table = tensors(tmp_path / "out")["embed_tokens.weight"]
    with torch.no_grad():
        assert torch.equal(table, gemma.get_input_embeddings()(torch.arange(64)))
    assert not torch.equal(table, gemma.get_input_embeddings().weight)


STOCK = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
drafter = AutoModel.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
passes = 0
def count(*_):
    global passes
    passes += 1
target.model.register_forward_hook(count)
out = target.generate(
    torch.tensor([json.loads(sys.argv[3])]), do_sample=False, max_new_tokens=40,
    assistant_model=drafter, speculation_type="dflash",
)
print(json.dumps({"ids": out[0].tolist(), "passes": passes, "ours": "hf_specdraft" in sys.modules}))
"""


def test_stock_transformers_runs_the_native_export_without_us(tmp_path, target):
    """The drafter of z-lab's own format, trained elsewhere, drafts the same tokens in the same rounds there."""
    drafter, gold = AutoDrafter.from_pretrained(FIXTURES / "dflash-zlab/drafter"), golden("dflash-zlab/drafter", "a")
    export(drafter, "transformers", tmp_path / "native", target)
    prompt = gold["prompt"].tolist()
    arguments = [str(FIXTURES / "dflash-target"), str(tmp_path / "native"), json.dumps(prompt)]
    ran = subprocess.run([sys.executable, "-c", STOCK, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    stock = json.loads(ran.stdout.splitlines()[-1])
    ours = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=40,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert stock["ours"] is False
    assert stock["ids"] == ours.sequences[0].tolist()
    assert stock["passes"] < 30  # 40 tokens: drafts were accepted there too


REFUSALS = {
    "own head": (dict(own_head=True), "zlab", "its own head"),
    "own head, native": (dict(own_head=True), "transformers", "its own head"),
    "own embeddings": (dict(own_embeddings=True), "specforge", "its own embeddings"),
    "trimmed head": (dict(own_head=True, draft_vocab_size=64), "transformers", "a reduced vocabulary"),
    "low-rank head": (dict(own_embeddings=True, own_head=True, draft_head_rank=8), "speculators", "a low-rank head"),
    "slots": (dict(anchor_drafts=True), "zlab", "an anchor slot that drafts"),
    "slots of DeepSpec": (dict(own_embeddings=True, own_head=True), "deepspec", "an anchor slot that does not draft"),
    "width": (
        dict(own_embeddings=True, own_head=True, target_hidden_size=128, anchor_drafts=True),
        "deepspec",
        "another hidden size",
    ),
    "biases": (dict(attention_bias=True), "transformers", "biases in attention"),
    "rotary": (
        dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "transformers",
        "a partial rotary factor",
    ),
    "window": (
        dict(layer_types=["sliding_attention"] * 2, sliding_window=4, sliding_rule="query"),
        "transformers",
        "sliding layers by the rule 'query'",
    ),
    "causal window": (
        dict(layer_types=["sliding_attention"] * 2, sliding_window=4, sliding_causal=True),
        "transformers",
        "causal in the block",
    ),
    "borrowed parts": ({}, "speculators", "give the target"),
    "size unknown": (dict(vocab_size=None), "zlab", "give the target"),
    "no such format": ({}, "gguf", "it knows zlab"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_what_a_format_cannot_express(case, tmp_path):
    fields, dialect, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        export(block(**fields), dialect, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_target_that_is_not_the_drafters(tmp_path):
    with pytest.raises(ValueError, match="vocabulary of 512 but the target has 64"):
        export(block(), "speculators", tmp_path / "out", tiny_llama())


def test_refuses_to_round_what_it_copies(tmp_path, target):
    with pytest.raises(ValueError, match="load both as one dtype"):
        export(block().to(torch.bfloat16), "speculators", tmp_path / "out", target)


def test_families_without_formats_say_so(tmp_path):
    with pytest.raises(ValueError, match="no format but its own"):
        export(NgramDrafter(NgramConfig.tiny()), "zlab", tmp_path / "out")
    assert set(block_exports.DIALECTS) <= set(export_dialects())


def test_what_reads_back_differently_is_not_exported(tmp_path, monkeypatch):
    def broken(drafter, dialect, target):
        values, state = honest(drafter, dialect, target)
        return {**values, "rms_norm_eps": 1e-3}, {**state, "norm.weight": state["norm.weight"] + 1}

    honest = block_exports._zlab
    monkeypatch.setattr(block_exports, "_zlab", broken)
    with pytest.raises(ValueError, match="no place for norm.weight, rms_norm_eps"):
        export(block(), "zlab", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tells_what_the_format_does_not_carry(tmp_path):
    drafter = block(num_assistant_tokens=2, policy="fixed", target_name="org/target", num_target_layers=6)
    assert export(drafter, "zlab", tmp_path / "out") == ["num_assistant_tokens", "policy", "target_name"]


def test_the_command(tmp_path):
    AutoDrafter.from_pretrained(FIXTURES / "dflash-zlab/drafter").save_pretrained(tmp_path / "mine")
    ask = ["export", str(tmp_path / "mine"), "--format", "speculators", "--out", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="give the target"):
        CliRunner().invoke(app, ask, catch_exceptions=False)
    said = CliRunner().invoke(app, [*ask, "--target", str(FIXTURES / "dflash-target")], catch_exceptions=False)
    assert said.exit_code == 0 and str(tmp_path / "out") in said.stdout
    assert_same_tensors(tensors(tmp_path / "out"), tensors(FIXTURES / "dflash-speculators/drafter-converted"))
    with pytest.raises(ValueError, match="is not empty"):
        CliRunner().invoke(app, ask, catch_exceptions=False)


def test_wrong_path(tmp_path):
    os.makedirs(tmp_path / "empty")
    for path in ("nowhere", "empty"):
        with pytest.raises((OSError, ValueError), match=path):
            ask = ["export", str(tmp_path / path), "--format", "zlab", "--out", str(tmp_path / "out")]
            CliRunner().invoke(app, ask, catch_exceptions=False)
    assert Path(tmp_path / "out").exists() is False
