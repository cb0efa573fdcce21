"""examples/lora_maths.py on a tiny model: what it learns from, what it saves, and what it prints."""

from __future__ import annotations

import json
import re
import runpy
import sys

import test_train_cli
from test_cli import ROOT

from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.evaluation import load_target
from hf_specdraft.training.data import load

place = test_train_cli.place


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_an_adapter_is_trained_on_maths_and_measured_everywhere(place, tmp_path, monkeypatch, capsys):
    target, _ = load_target(str(place / "target"))
    sizes = dict(target_layer_ids=[0, 2], num_assistant_tokens=3)
    Eagle3Drafter(Eagle3Config.for_target(target.config, **sizes)).save_pretrained(tmp_path / "drafter")
    chats = [("gsm8k-train", "one and one?"), ("gsm8k-train", "two and two?"), ("mbpp", "print it"), ("gsm8k", "known")]
    answers = jsonl(
        tmp_path / "answers.jsonl",
        [{"id": str(i), "source": s, "prompt": p, "answer": "so: " + p} for i, (s, p) in enumerate(chats)],
    )
    asked = [("qa", "why?"), ("math_reasoning", "three and four?"), ("math_reasoning", "known"), ("qa", "who?")]
    prompts = jsonl(
        tmp_path / "prompts.jsonl",
        [{"id": str(i), "category": c, "turns": [text]} for i, (c, text) in enumerate(asked)],
    )
    monkeypatch.chdir(tmp_path)
    tiny = ("trainer.max_steps=2", "trainer.bf16=false", "trainer.use_cpu=true", "trainer.disable_tqdm=true")
    given = (f"target={place / 'target'}", f"drafter.init_from={tmp_path / 'drafter'}", *tiny)
    monkeypatch.setattr(sys, "argv", ["lora_maths.py", answers, prompts, *given])
    runpy.run_path(str(ROOT / "examples" / "lora_maths.py"), run_name="__main__")

    assert load("maths")[0]["id"] == ["0", "1"]  # neither the code nor what is asked below
    names = {path.name for path in (tmp_path / "maths-adapter").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    heading, *rows = capsys.readouterr().out.splitlines()[-3:]
    assert heading.split() == ["tau", "before", "after"]
    found = [re.fullmatch(r"(\w+) +(\d\.\d\d) +(\d\.\d\d)", row).groups() for row in rows]
    assert [category for category, _, _ in found] == ["math_reasoning", "qa"]
    assert all(1 <= float(tau) <= 4 for _, *taus in found for tau in taus)
