"""hf-specdraft train: a drafter for a target, from a YAML config."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(help="A recipe, or a YAML file (examples/train_block.yaml shows all).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as trainer.learning_rate=1e-4, over the file's.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the interrupted run in trainer.output_dir, exactly.")
    ] = False,
) -> None:
    """Train a drafter, or an adapter of one, for a target.

    `drafter.init_from` starts a new run from trained weights; --resume continues a run, optimizer and all. Under
    `torchrun` or `accelerate launch` the run spreads over processes.
    """
    from ..training.config import TrainConfig

    overrides = overrides or []
    if resume and any(item.startswith("drafter.init_from") for item in overrides):
        raise ValueError(
            "--resume continues a run from its own checkpoint, and drafter.init_from starts a new one: drop either"
        )
    described = TrainConfig.read(config, overrides)
    checkpoint = described.checkpoint() if resume else None
    if not resume:
        described.refuse_used_folder()
    trainer = described.build(command=shlex.join(["hf-specdraft", *sys.argv[1:]]))
    if trainer.is_world_process_zero():
        described.save(trainer.args.output_dir)
    result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.finish()
    if trainer.is_world_process_zero():
        tau = f", best {trainer.args.metric_for_best_model} {best:.3f}" if (best := trainer.state.best_metric) else ""
        print(f"{result.global_step} steps{tau}; drafter in {trainer.args.output_dir}")
    trainer.accelerator.end_training()  # the process group's threads end before the interpreter
