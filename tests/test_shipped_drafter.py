"""The drafter that comes with the repository: it loads, is small, says where it comes from, drafts for its model."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from hf_specdraft import AutoDrafter, CombinedDrafter, Eagle3Drafter, NgramConfig, NgramDrafter, evaluation
from hf_specdraft.publishing import Provenance, template_mismatch

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "model_cards" / "SmolLM2-135M-Instruct-eagle3"


def test_it_is_complete():
    assert (FOLDER / "model.safetensors").stat().st_size < 40e6
    drafter = AutoDrafter.from_pretrained(FOLDER)
    assert isinstance(drafter, Eagle3Drafter) and type(AutoModel.from_pretrained(FOLDER)) is Eagle3Drafter
    made = Provenance.load(FOLDER)
    assert made.steps and made.data["splits"]["train"]["supervised_tokens"] > 200_000
    assert made.chat_template["sha256"] == drafter.config.chat_template_sha256
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    measured = json.loads((FOLDER / "bench.json").read_text(encoding="utf-8"))
    overall = next(row for row in measured["rows"] if row["category"] == "overall")
    assert f"{overall['tau']:.2f}" in card


@pytest.mark.slow
def test_it_drafts_for_its_model():
    get_model = runpy.run_path(str(ROOT / "scripts" / "get_model.py"))["get_model"]
    target, tokenizer = evaluation.load_target(str(get_model()), "float32")
    network = AutoDrafter.from_pretrained(FOLDER, dtype=torch.float32, policy="fixed")
    assert template_mismatch(network, tokenizer, {}) is None
    both = CombinedDrafter.from_drafters(NgramDrafter(NgramConfig()), network, policy="fixed", mode="tree")
    texts = (
        "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell?",
        "What is rain?",
    )
    taus = []
    for drafter in (network, both):
        committed = passes = 0
        for text in texts:
            inputs = evaluation.encode(tokenizer, text)
            plain = evaluation.run(target, inputs, 64)
            fast = evaluation.run(target, inputs, 64, assistant_model=drafter)
            assert fast.ids == plain.ids
            committed, passes = committed + fast.committed, passes + fast.passes
        taus.append(committed / passes)
    assert taus[0] > 1.5 and taus[1] > 1.5
