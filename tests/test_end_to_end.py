"""From a target and some prompts to a published drafter, by the commands alone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from test_cli import byte_tokenizer, call
from test_train_cli import EXAMPLE
from test_trainer import make_target
from transformers import AutoModel

from hf_specdraft.training.data import load

TEXTS = [
    "abcabc",
    "hello there",
    "one two three",
    "0123",
    "xyz",
    "to be",
    "la la",
    "round and round",
    "why",
    "so it goes",
]


@pytest.mark.slow
def test_from_zero_to_a_published_folder(tmp_path):
    target, answers, out = tmp_path / "target", tmp_path / "answers", tmp_path / "drafter"
    model, tokenizer = make_target(vocab_size=256), byte_tokenizer()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "category": "ab"[i % 2], "turns": [text]} for i, text in enumerate(TEXTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    ask = ("--target", target, "--prompts", prompts, "--out", answers)
    call("data", *ask, "--max-new-tokens", 32, "--temperature", 0, "--held-out", 0)
    train, held_out, about = load(answers)
    assert len(train) == len(TEXTS) and held_out is None

    config = yaml.safe_load(EXAMPLE.read_text())
    config.update(target=str(target), data=str(answers), eval_prompts={"file": str(prompts), "per_category": 1})
    config["drafter"].update(block_size=4, mask_token_id=255)
    config["loss"] = {"terms": "ce"}
    config["unroll"] = {"anchors": None}
    config["trainer"] = dict(
        output_dir=str(out),
        use_cpu=True,
        max_steps=150,
        per_device_train_batch_size=10,
        learning_rate=0.01,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=75,
        eval_max_new_tokens=32,
        disable_tqdm=True,
    )
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    call("train", file)

    measured = tmp_path / "bench.json"
    call(
        "bench",
        "--target",
        target,
        "--prompts",
        prompts,
        "--drafter",
        out,
        "--max-new-tokens",
        32,
        "--per-category",
        1,
        "--json",
        measured,
    )
    call("card", out, "--bench", measured)
    card = (out / "README.md").read_text()
    assert "150" in card and "dflash" in card and about["chat_template_sha256"][:12] in card

    published = shutil.copytree(out, tmp_path / "elsewhere" / "drafter")
    drafter = AutoModel.from_pretrained(published, policy="fixed").eval()  # drafts do not pay on so small a target
    inputs = {k: v for k, v in tokenizer("round and round>", return_tensors="pt").items() if k != "token_type_ids"}
    ask = dict(max_new_tokens=32, do_sample=False)
    plain = model.generate(**inputs, **ask)
    drafted = model.generate(**inputs, **ask, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(drafted.sequences, plain)
    assert drafted.speculation.tau > 3
