"""The target's hidden states on disk, for targets too slow or too large to run in every epoch.

A folder holds `manifest.json` and safetensors shards of consecutive rows. A shard has the tensors `features` [T, n*Ht],
`last_hidden` [T, Ht], `input_ids` and `document_ids` [T] of its T tokens, and `offsets` [rows + 1].
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from .features import LiveFeatures, spread
from .files import write_whole
from .records import TrainingBatch

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_IDS_BYTES = 2 * 4  # of a token's input_ids and document_ids, int32


class CapturedFeatures:
    """Fills a batch's `features` and `last_hidden` from a folder that `capture` wrote. Shards are opened when read.

    dataset, target, layers, law: what training uses; what is given is compared with what was captured. Of the target,
        the first row's states are: a name would not tell a fine-tuned model from its base.

    Raises ValueError when the folder holds no capture, an unfinished one, or one of something else.
    """

    def __init__(
        self,
        folder: str | Path,
        dataset: Dataset | None = None,
        target: PreTrainedModel | None = None,
        layers: tuple[int, ...] | None = None,
        law: bool | None = None,
    ):
        self.folder = Path(folder)
        if not (self.folder / "manifest.json").is_file():
            raise ValueError(f"{self.folder} holds no captured features (no manifest.json); run capture first")
        self.manifest = json.loads((self.folder / "manifest.json").read_text())
        self.layers, self.law = tuple(self.manifest["layers"]), self.manifest["law"]
        self._first = [first for first, _ in self.manifest["shards"]]
        missing = [number for number in range(len(self._first)) if not _shard(self.folder, number).is_file()]
        if missing:
            raise ValueError(
                f"the capture in {self.folder} is not finished: {len(missing)} of {len(self._first)} shards are "
                "missing; run the same capture again, it goes on where it stopped"
            )
        wanted = {
            "layers": None if layers is None else list(layers),
            "law": law or None,  # an unused last_hidden does no harm
            "dataset": None if dataset is None else _survey(dataset)[1],
        }
        _refuse_other(self.folder, self.manifest, {k: v for k, v in wanted.items() if v is not None})
        if target is not None:
            _refuse_other_target(_shard(self.folder, 0), self.manifest, target)

    def __call__(self, batch: TrainingBatch, index: Tensor | None) -> TrainingBatch:
        """The batch with `features` and `last_hidden` as LiveFeatures gives them, in the dtype stored, on its device.

        index: [B] row numbers in the data set that was captured.
        Raises ValueError when a row's tokens or documents are not those captured under its number.
        """
        if index is None:
            raise ValueError("captured features are found by row number: give the batch's `index`")
        live = batch.document_ids > 0
        rows = [self._row(i) for i in index.tolist()]
        for row, (i, stored) in enumerate(zip(index.tolist(), rows)):
            for name in ("input_ids", "document_ids"):
                if not torch.equal(stored[name].long(), getattr(batch, name)[row, live[row]].cpu()):
                    raise ValueError(
                        f"row {i} has other {name} than were captured in {self.folder}; train on the data set that "
                        "was captured, unshuffled numbering included, or capture this one"
                    )
        filled = {
            name: spread(torch.cat([row[name] for row in rows]).to(live.device), live)
            for name in ("features", "last_hidden")
            if name in rows[0]
        }
        return replace(batch, **filled)

    def _row(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < self.manifest["rows"]:
            raise ValueError(f"there is no row {i} in {self.folder}: {self.manifest['rows']} rows were captured")
        number = bisect_right(self._first, i) - 1
        return _stored_row(_shard(self.folder, number), i - self._first[number])


def capture(
    target: PreTrainedModel,
    dataset: Dataset,
    layers: tuple[int, ...],
    folder: str | Path,
    cap_bytes: int = 64 * 2**30,
    dtype: torch.dtype | None = None,
    law: bool = True,
    shard_bytes: int = 2**30,
    batch_tokens: int = 8192,
) -> CapturedFeatures:
    """Run the target over a data set and store what LiveFeatures would give. Prints the size before it starts.

    dataset: columns input_ids and document_ids. layers, law: see LiveFeatures.
    cap_bytes: the most that may be stored. dtype: of the stored values, the target's by default.
    shard_bytes: about the size of a file, held in memory until written. batch_tokens: tokens a pass takes.

    A second run with the same arguments goes on behind the last finished shard.
    Raises ValueError, before it starts, when the size exceeds the cap or the free disk, or the folder holds a capture
    of something else; during it, when a layer gives values that are not finite. Raises OSError when a shard cannot be
    written: finished shards stay, partial ones are removed.
    """
    folder = Path(folder)
    live = LiveFeatures(target, layers, law, dtype)
    name = str(live.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"features cannot be stored as {name}; give dtype as one of torch.{', torch.'.join(_DTYPES)}")
    if not live.layers and not law:
        raise ValueError("nothing to capture: no layers and no law; run without features instead")
    lengths, fingerprint = _survey(dataset)
    config = live.target.config
    token = live(_batch({"input_ids": [[0]], "document_ids": [[1]]}, live.target.device))
    width = sum(states.shape[-1] for states in (token.features, token.last_hidden) if states is not None)
    sizes = [length * (width * live.dtype.itemsize + _IDS_BYTES) + 8 for length in lengths]
    shards = _plan(sizes, shard_bytes)
    manifest = {
        "layers": list(live.layers),
        "law": law,
        "dtype": name,
        "dataset": fingerprint,
        "rows": len(lengths),
        "tokens": sum(lengths),
        "shards": shards,
        "target": {"name": config._name_or_path, "revision": getattr(config, "_commit_hash", None)},
    }
    resumed = (folder / "manifest.json").is_file()
    if resumed:
        found = json.loads((folder / "manifest.json").read_text())
        _refuse_other(folder, found, {k: v for k, v in manifest.items() if k != "target"})
    done = [resumed and _is_finished(_shard(folder, number)) for number in range(len(shards))]
    if any(done):
        _refuse_other_target(_shard(folder, done.index(True)), manifest, target)

    left = sum(sum(sizes[first:end]) for (first, end), finished in zip(shards, done) if not finished)
    _announce(folder, manifest, sum(sizes), left, cap_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob("*.partial"):
        left_over.unlink()  # of a run that was killed
    write = partial(write_whole, remedy="finished shards are kept, so make room and run the same capture again")
    write(folder / "manifest.json", lambda path: path.write_text(json.dumps(manifest, indent=1)))
    with tqdm(total=sum(lengths), unit="token", unit_scale=True, desc="capturing") as bar:
        for number, (first, end) in enumerate(shards):
            if done[number]:
                bar.update(sum(lengths[first:end]))
                continue
            tensors = _captured(live, dataset, range(first, end), lengths, batch_tokens, bar)
            write(_shard(folder, number), lambda path, tensors=tensors: save_file(tensors, path))
    return CapturedFeatures(folder)


def _captured(
    live: LiveFeatures, dataset: Dataset, rows: range, lengths: list[int], batch_tokens: int, bar: tqdm
) -> dict[str, Tensor]:
    """The tensors of one shard."""
    parts: dict[str, list[Tensor]] = {}
    for chunk in _batches(rows, lengths, batch_tokens):
        batch = _batch(dataset[chunk.start : chunk.stop], live.target.device)
        filled = live(batch)
        inside = filled.document_ids > 0
        for name in ("input_ids", "document_ids", "features", "last_hidden"):
            value = getattr(filled, name)
            if value is not None:
                value = value[inside].cpu()
                parts.setdefault(name, []).append(value.int() if name.endswith("ids") else value)
        bar.update(int(inside.sum()))
    offsets = torch.tensor([0, *np.cumsum([lengths[i] for i in rows])])
    return {"offsets": offsets, **{name: torch.cat(values) for name, values in parts.items()}}


def _batches(rows: range, lengths: list[int], tokens: int) -> Iterator[range]:
    """Consecutive rows of together about `tokens` tokens, padding to the longest included."""
    first, longest = rows.start, 0
    for i in rows:
        longest = max(longest, lengths[i])
        if i > first and (i + 1 - first) * longest > tokens:
            yield range(first, i)
            first, longest = i, lengths[i]
    yield range(first, rows.stop)


def _batch(rows: dict[str, list], device: torch.device) -> TrainingBatch:
    """What LiveFeatures needs of these rows: tokens and documents."""
    ids, documents = (
        pad_sequence([torch.as_tensor(row) for row in rows[name]], batch_first=True).long().to(device)
        for name in ("input_ids", "document_ids")
    )
    return TrainingBatch(ids, documents, position_ids=torch.zeros_like(ids), loss_mask=documents > 0)


def _survey(dataset: Dataset) -> tuple[list[int], str]:
    """Tokens in each row, and a hash of all tokens and documents."""
    missing = {"input_ids", "document_ids"} - set(dataset.column_names)
    if missing:
        raise ValueError(
            f"the data set has no column {', '.join(sorted(missing))}; make one with the hf-specdraft data command"
        )
    lengths, digest = [], hashlib.sha256()
    for start in range(0, len(dataset), 1000):
        rows = dataset[start : start + 1000]
        for i, (ids, documents) in enumerate(zip(rows["input_ids"], rows["document_ids"]), start):
            if not len(ids) or len(ids) != len(documents) or min(documents) < 1:
                raise ValueError(
                    f"row {i} of the data set has {len(ids)} tokens and document_ids {list(documents)[:8]}...; each "
                    "token needs one, from 1, and each row a token"
                )
            lengths.append(len(ids))
            digest.update(np.asarray([len(ids), *ids, *documents], dtype=np.int64).tobytes())
    if not lengths:
        raise ValueError("the data set is empty; give one with at least one row")
    return lengths, digest.hexdigest()


def _plan(sizes: list[int], shard_bytes: int) -> list[list[int]]:
    """[first row, row behind the last] of each shard."""
    shards, first, size = [], 0, 0
    for i, row in enumerate(sizes):
        if i > first and size + row > shard_bytes:
            shards.append([first, i])
            first, size = i, 0
        size += row
    return [*shards, [first, len(sizes)]]


def _announce(folder: Path, manifest: dict, size: int, left: int, cap_bytes: int) -> None:
    """Print what will be stored; ValueError when it must not or cannot be."""
    what = (
        f"{manifest['tokens']:,} tokens x layers {manifest['layers']}{' and the last state' * manifest['law']} in "
        f"{manifest['dtype']} take {_readable(size)} in {len(manifest['shards'])} shards"
    )
    remedy = "store fewer rows or layers, or use LiveFeatures, which stores nothing"
    if size > cap_bytes:
        raise ValueError(f"{what}, over the cap of {_readable(cap_bytes)}; raise the cap, {remedy}")
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free
    if left > free:
        raise ValueError(f"{what}, of which {_readable(left)} are to come, but {disk} has {_readable(free)}; {remedy}")
    tqdm.write(f"{what} ({_readable(left)} to come, {_readable(free)} free)")


def _readable(size: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.1f} {units[0]}"


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


def _is_finished(path: Path) -> bool:
    """Whether a shard is whole: its header names the bytes it must have."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _stored_row(shard: Path, row: int) -> dict[str, Tensor]:
    with safe_open(shard, "pt") as file:
        start, end = file.get_slice("offsets")[row : row + 2].tolist()
        return {name: file.get_slice(name)[start:end] for name in file.keys() if name != "offsets"}


def _refuse_other(folder: Path, found: dict, wanted: dict) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ValueError(
                f"{folder} holds a capture with {key} {_brief(found.get(key))}, not {_brief(value)}; use what it was "
                "made with, or capture to another folder"
            )


def _brief(value) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_other_target(shard: Path, manifest: dict, target: PreTrainedModel) -> None:
    """Compare a shard's first row with what this target gives for it."""
    stored = _stored_row(shard, 0)
    live = LiveFeatures(target, tuple(manifest["layers"]), manifest["law"], _DTYPES[manifest["dtype"]])
    rows = {name: [stored[name].tolist()] for name in ("input_ids", "document_ids")}
    filled = live(_batch(rows, live.target.device))
    # Another batch or device rounds otherwise: half precision differs by 1 or 2 % through a deep model.
    tolerance = 1e-3 if live.dtype == live.target.dtype == torch.float32 else 0.05
    for name in {"features", "last_hidden"} & set(stored):
        ours, theirs = getattr(filled, name)[0].cpu().float(), stored[name].float()
        if ours.shape != theirs.shape or not _difference(ours, theirs) <= tolerance:
            raise ValueError(
                f"{shard.parent} was captured from another target ({manifest['target']['name'] or 'unnamed'}, revision "
                f"{manifest['target']['revision']}): {name} of its first row differ; use that one, or capture again"
            )


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The usual column's distance in units of its length: the first tokens of many models are hundreds of times longer
    than all others, and would hide them in a common norm."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median())
