"""hf-specdraft capture: the target's hidden states on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from .. import evaluation
from .options import Device, Dtype


def capture(
    out: Annotated[Path, typer.Option(file_okay=False, help="The folder; a training config names it as features.")],
    config: Annotated[
        Path | None, typer.Argument(help="A training config, whose target, data and drafter say what to store.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value over the config's, as for train.")] = None,
    target: Annotated[str | None, typer.Option(help="Without a config: a folder or Hub name.")] = None,
    data: Annotated[Path | None, typer.Option(help="Without a config: a folder of `hf-specdraft data`.")] = None,
    layers: Annotated[
        list[int] | None,
        typer.Option(help="Without a config: zero-based, -1 for the embedding. Several times, in the drafter's order."),
    ] = None,
    law: Annotated[bool, typer.Option(help="Store the last state as well, for losses that read the law.")] = True,
    cap: Annotated[float, typer.Option(min=0, help="GiB to store at most.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Of what is stored; auto is the target's.")] = Dtype.auto,
    device: Device = "cpu",
) -> None:
    """Store what training reads of the target, so that it need not run along. Stopped, the same command continues."""
    from ..training import capture as capturing
    from ..training.config import TrainConfig
    from ..training.data import load

    alone = target is not None and data is not None and bool(layers)
    if alone == (config is not None) or config is not None and (target or data or layers):
        raise ValueError("give either a training config, or all of --target, --data and --layers")
    if config is not None:
        model, texts, layers = TrainConfig.read(config, overrides or ()).read_of()
    else:
        texts = load(data)[0]
        model, _ = evaluation.load_target(target)
    stored = None if dtype is Dtype.auto else getattr(torch, dtype.value)
    capturing.capture(model.to(device), texts, tuple(layers), out, int(cap * 2**30), stored, law)
    print(f"features in {out}")
