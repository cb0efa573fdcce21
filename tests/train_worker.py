"""One of the processes that test_trainer_distributed.py starts: FOLDER and fields of DraftTrainingArguments as JSON for
a run, or FOLDER and "shard" to compare the gradients of FSDP-sharded drafters with those of whole ones."""

import copy
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from test_trainer import answers, make_drafter, make_target, prompts_of, rows, trainer
from torch.distributed.fsdp import fully_shard

from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.integration import as_drafter
from hf_specdraft.training.data import collate
from hf_specdraft.training.features import LiveFeatures, TargetLaw
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import TrainingBatch


def train(folder: Path, **changes) -> dict:
    target = make_target()
    data = answers(target, count=5)  # no multiple of the processes
    run = trainer(target, folder, eval_dataset=data, eval_prompts=prompts_of(data), **changes)
    run.train()
    metrics = run.evaluate()
    run.finish()
    return {**metrics, "distributed": run.accelerator.distributed_type.value}


def shard() -> dict:
    """By family, the largest difference of a gradient, relative to the largest gradient."""
    dist.init_process_group("gloo")
    target = make_target()
    columns = collate(list(rows(4)), 0)
    differences = {}
    for whole in (make_drafter(own_head=True), Eagle3Drafter(Eagle3Config.for_target(target.config))):
        sharded = copy.deepcopy(whole)
        kinds = whole._no_split_modules or []  # as accelerate shards
        for module in [m for m in sharded.modules() if type(m).__name__ in kinds]:
            fully_shard(module)
        fully_shard(sharded)
        assert as_drafter(sharded) is sharded
        batch = LiveFeatures(target, whole.feature_layers)(TrainingBatch(**columns))
        # Chunks, so that the head's part is computed again in backward.
        loss = DraftLoss({"ce": 1.0, "tv": 1.0}, chunk_size=16)
        step = partial(loss, view=TargetView(target), batch=batch, law=TargetLaw(target), anchors=None)
        for drafter in (whole, sharded):
            drafter(training=step)["loss"].backward()
        pairs = [(p.grad, s.grad.full_tensor()) for p, s in zip(whole.parameters(), sharded.parameters())]
        scale = max(one.abs().max() for one, _ in pairs)
        differences[type(whole).__name__] = max(float((one - other).abs().max() / scale) for one, other in pairs)
    return differences


if __name__ == "__main__":
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    found = shard() if sys.argv[2] == "shard" else train(folder, **json.loads(sys.argv[2]))
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()  # gloo's threads may abort an interpreter that ends before them
