"""Two gloo processes on the CPU give what one process gives with the same global batch.

accelerate makes no FSDP runs on CPUs, so what FSDP does to a drafter is tested with torch's own call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_trainer import answers, distance, make_target, prompts_of, trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WORKER = Path(__file__).with_name("train_worker.py")
CHANGES = dict(max_steps=3, per_device_eval_batch_size=2, max_grad_norm=0.5)


def two_processes(folder: Path, work: str) -> dict:
    """What the first of two workers found."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*launch, str(folder), work], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


def test_two_processes_equal_one(tmp_path):
    target = make_target()
    data = answers(target, count=5)
    one = dict(CHANGES, per_device_train_batch_size=4)
    run = trainer(target, tmp_path / "one", eval_dataset=data, eval_prompts=prompts_of(data), **one)
    run.train()
    expected = run.evaluate()
    run.finish()

    two = dict(CHANGES, per_device_train_batch_size=1, gradient_accumulation_steps=2, ddp_backend="gloo")
    (tmp_path / "two").mkdir()
    found = two_processes(tmp_path / "two", json.dumps(two))
    assert found["distributed"] == "MULTI_CPU"
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert distance(*weights) < 1e-5
    for key in ("eval_loss", "eval_tau", "eval_tau_first", "eval_simulated_tau", "eval_accuracy_1", "eval_accepted"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key


def test_sharded_drafters_have_the_gradients_of_whole_ones(tmp_path):
    found = two_processes(tmp_path, "shard")
    assert set(found) == {"BlockDrafter", "Eagle3Drafter"}
    assert max(found.values()) < 1e-5, found
