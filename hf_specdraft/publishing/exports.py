"""Drafters in the formats of other projects, for the engines that read those."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..drafters import AutoDrafter, DrafterConfig, families

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..drafters.base import Drafter


# How to draft, for whom, and where a drafter comes from: what formats have no or another place for, and what the
# network does not compute with.
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}
_CONDUCT = set(DrafterConfig.__annotations__) - {"vocab_size"} - _TOKENS | {
    "draft_sampling",
    "num_target_layers",
    "tree_width",
}
_BOOKKEEPING = set(DrafterConfig.__dataclass_fields__) - {"vocab_size"} | {"initializer_range"}


def export_dialects() -> list[str]:
    """The names of all formats that some family writes."""
    return sorted({name for family in families().values() for name in family.export_dialects})


def export(drafter: Drafter, dialect: str, folder: str | Path, target: PreTrainedModel | None = None) -> list[str]:
    """Write a drafter into a new folder in another project's format, and read it back to see that it is the same.

    target: wanted where the format stores an embedding or a head that the drafter borrows.
    Returns the config fields that the format does not carry: how to draft, for whom, and where the drafter comes from.
    What its network computes with is in the folder to the bit, or this raises ValueError and leaves no folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; give a new folder, or remove what is there")
    if dialect not in drafter.export_dialects:
        raise ValueError(
            f"{type(drafter).__name__} cannot be written as {dialect!r}; it knows "
            f"{', '.join(drafter.export_dialects) or 'no format but its own'}"
        )
    written, config, tensors = drafter.to_dialect(dialect, target)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        (Path(scratch) / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # Copies, because a format has no word for tensors that share memory.
        tensors = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }
        save_file(tensors, Path(scratch) / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        read = AutoDrafter.from_pretrained(scratch, dtype=written.dtype)
        _require_equal(written, read, dialect)
        folder.mkdir(exist_ok=True)
        for file in Path(scratch).iterdir():
            shutil.move(file, folder / file.name)
    return sorted(key for key in _CONDUCT if getattr(drafter.config, key, None) != getattr(read.config, key, None))


def _require_equal(written: Drafter, read: Drafter, dialect: str) -> None:
    """Raise ValueError when the reader makes another drafter of what was written."""
    ours, theirs = written.state_dict(), read.state_dict()
    lost = [name for name in {**ours, **theirs} if not _same_tensor(ours.get(name), theirs.get(name))]
    fields = set(written.config.__dataclass_fields__) - _CONDUCT - _BOOKKEEPING
    lost += [
        f"{key} = {getattr(written.config, key)!r}"
        for key in sorted(fields)
        if getattr(written.config, key) != getattr(read.config, key, None)
    ]
    if lost:
        raise ValueError(f"the format {dialect!r} has no place for {', '.join(lost)} of this drafter")


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one.cpu(), other.cpu())
