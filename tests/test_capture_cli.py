"""hf-specdraft capture on a tiny model: what it stores, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
import test_train_cli
import torch
from safetensors.torch import load_file
from test_cli import call

from hf_specdraft import cli
from hf_specdraft.training.capture import CapturedFeatures
from hf_specdraft.training.data import load

place, config = test_train_cli.place, test_train_cli.config


def direct(place):
    return ("capture", "--target", place / "target", "--data", place / "answers", "--layers", 0, "--layers", -1)


def test_layers_are_stored_in_the_order_given(place, tmp_path):
    out = tmp_path / "features"
    said = call(*direct(place), "--out", out, "--dtype", "bfloat16", "--no-law")
    assert said.stdout.splitlines()[-1] == f"features in {out}"
    captured = CapturedFeatures(out, load(place / "answers")[0], layers=(0, -1))
    assert captured.manifest["dtype"] == "bfloat16" and not captured.law
    stored = load_file(out / "features-00000.safetensors")
    embedding = load_file(place / "target" / "model.safetensors")["model.embed_tokens.weight"]
    width = embedding.shape[1]
    assert torch.equal(stored["features"][:, width:], embedding[stored["input_ids"].long()].bfloat16())
    assert "last_hidden" not in stored


def test_a_training_config_says_what_its_drafter_reads(config, place, tmp_path):
    out = tmp_path / "features"
    call("capture", config, "drafter.target_layer_ids=[2, 0]", "--out", out)
    assert json.loads((out / "manifest.json").read_text())["layers"] == [2, 0]
    short = ("trainer.max_steps=1", "trainer.eval_strategy=no", "trainer.load_best_model_at_end=false")
    call("train", config, "drafter.target_layer_ids=[2, 0]", f"features={out}", *short)
    # Of another drafter's config, training says that these are not its layers.
    with pytest.raises(ValueError, match=r"layers \[2, 0\], not \[1\]"):
        call("train", config, "drafter.target_layer_ids=[1]", f"features={out}", f"trainer.output_dir={tmp_path}/b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cap", "0.000001"), "over the cap of"),
        (("--layers", "9"), "layer 9"),
        (("--data", "nowhere"), "nowhere is no data folder"),
        (("--target", "./nowhere"), "nowhere"),
        (("train.yaml",), "either a training config, or all of"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_written(options, message, place, tmp_path, monkeypatch, capsys):
    arguments = ["hf-specdraft", *map(str, direct(place)), "--out", str(tmp_path / "out"), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and said[-1].startswith("hf-specdraft: ") and message in said[-1]
    assert not (tmp_path / "out").exists()


def test_half_a_target_is_refused(place, tmp_path):
    with pytest.raises(ValueError, match="either a training config, or all of --target, --data and --layers"):
        call("capture", "--target", place / "target", "--out", tmp_path / "out")
