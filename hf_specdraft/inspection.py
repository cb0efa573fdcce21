"""What a drafter checkpoint is, and what is wrong with it: the work behind `hf-specdraft inspect`."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers.utils import CONFIG_NAME

from .drafters import AutoDrafter, Drafter, families

OWN = "hf_specdraft"
# What the dialects call the list of target layers, for a checkpoint that cannot be loaded.
_LAYER_KEYS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_TARGET_KEYS = ("target_name", "name_or_path")


@dataclass
class Inspection:
    """What `inspect_checkpoint` found; None where the checkpoint does not say.

    family: model_type of the family that reads it. dialect: "hf_specdraft" or the published dialect's name.
    target: the target it was made for; vocab_size, target_hidden_size, target_depth: what it needs of one.
    target_revision: the target's commit. trained_on: the chat template and mode of its training texts.
    layers: target layers whose output is read, zero-based; as written in the config while `loads` is False.
    parameters, dtypes: of the weight files.
    problems: why it is unusable or suspect. warnings: why it may draft badly as it is used. notes: what is worth
        knowing.
    """

    name: str
    family: str | None = None
    dialect: str | None = None
    architectures: list[str] = field(default_factory=list)
    target: str | None = None
    target_revision: str | None = None
    trained_on: str | None = None
    vocab_size: int | None = None
    target_hidden_size: int | None = None
    target_depth: int | None = None
    layers: list[int] | None = None
    parameters: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    loads: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def recognise(config: dict) -> tuple[type[Drafter] | None, str | None]:
    """(family, dialect) of a config.json, as AutoDrafter sees it; (None, None) when no family reads it."""
    own = families().get(config.get("model_type"))
    if own is not None:
        return own, OWN
    for family in families().values():
        dialect = family.dialect_of(config)
        if dialect is not None:
            return family, dialect
    return None, None


def inspect_checkpoint(
    name_or_path: str | Path, tokenizer: Any = None, template_kwargs: dict | None = None
) -> Inspection:
    """Read the config and the headers of the weight files, then try to load. Never raises for a broken checkpoint.

    tokenizer: the target's, and template_kwargs what its chat template is to be rendered with: whether they are those
        of the drafter's training.
    Raises OSError when there is no such folder or Hub repository.
    """
    found = Inspection(str(name_or_path))
    folder = Path(name_or_path)
    if not folder.is_dir():
        if folder.is_absolute() or str(name_or_path).startswith("."):
            raise OSError(f"there is no folder {name_or_path}")
        folder = Path(snapshot_download(str(name_or_path), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    read_headers(found, folder)
    config = _read_config(found, folder)
    if config is not None:
        family = _describe(found, config)
        if family is not None:
            drafter = _try_loading(found, folder, family, config)
            if drafter is not None:
                _read_template(found, drafter, tokenizer, template_kwargs)
    _note_tokenizer(found, folder)
    return found


def read_headers(found: Inspection, folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    dtypes: Counter[str] = Counter()
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    part = tensors.get_slice(key)
                    dtypes[part.get_dtype()] += math.prod(part.get_shape())
        except Exception as error:  # whatever a damaged file makes the reader raise is the finding
            found.problems.append(f"{file.name} cannot be read: {error}")
    # Integers are index tables and quantisation codes.
    found.dtypes, found.parameters = dict(dtypes), sum(n for dtype, n in dtypes.items() if "F" in dtype)
    others = [f.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in folder.glob(pattern)]
    if others and not files:
        found.problems.append(f"weights are pickles ({', '.join(sorted(others))}); only safetensors are read")


def _read_config(found: Inspection, folder: Path) -> dict | None:
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found.problems.append(f"{CONFIG_NAME} cannot be read: {error}")
        return None
    if not isinstance(config, dict):
        found.problems.append(f"{CONFIG_NAME} is no JSON object")
        return None
    return config


def _describe(found: Inspection, config: dict) -> type[Drafter] | None:
    architectures = config.get("architectures")
    found.architectures = [str(a) for a in architectures] if isinstance(architectures, list) else []
    found.target = next((value for key in _TARGET_KEYS if isinstance(value := _find(config, key), str)), None)
    found.layers = next((ids for key in _LAYER_KEYS if isinstance(ids := _find(config, key), list)), None)
    found.vocab_size = _find(config, "vocab_size")
    try:
        family, found.dialect = recognise(config)
    except Exception as error:  # a config of the wrong shape may break any dialect's test
        found.problems.append(f"{CONFIG_NAME} cannot be understood: {error!r}")
        return None
    if family is None:
        found.problems.append(
            f"no family reads model_type {config.get('model_type')!r} with architectures {found.architectures}; "
            f"families: {', '.join(sorted(families()))}"
        )
        return None
    found.family = family.config_class.model_type
    if found.dialect == OWN:
        # to_dict also has what every PreTrainedConfig carries.
        known = {*family.config_class().to_dict(), *family.config_class.__dataclass_fields__, "auto_map"}
        unknown = sorted(set(config) - known)
        if unknown:
            found.problems.append(f"{CONFIG_NAME} has keys that nothing reads: {', '.join(unknown)}")
    return family


def _find(config: Any, key: str) -> Any:
    """The value of `key` at the top of a config or in any object below it."""
    if not isinstance(config, dict):
        return None
    if config.get(key) is not None:
        return config[key]
    return next((value for part in config.values() if (value := _find(part, key)) is not None), None)


def _try_loading(found: Inspection, folder: Path, family: type[Drafter], config: dict) -> Drafter | None:
    try:
        if found.dialect == OWN and not family.is_free:
            drafter, info = family.from_pretrained(folder, output_loading_info=True)
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                if info[kind]:
                    found.problems.append(f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind])))}")
        else:
            drafter = AutoDrafter.from_pretrained(folder)
    except Exception as error:  # the exception's text is what the user came for
        found.problems.append(f"does not load: {type(error).__name__}: {error}")
        return None
    found.loads = True
    bad = [n for n, t in drafter.state_dict().items() if t.is_floating_point() and not torch.isfinite(t).all()]
    if bad:
        found.problems.append(f"not finite: {', '.join(bad)}")
    settings = drafter.config
    found.target = settings.target_name or found.target
    found.vocab_size = settings.vocab_size or found.vocab_size
    found.target_hidden_size = getattr(settings, "target_hidden_size", None)
    found.target_depth = getattr(settings, "num_target_layers", None)
    found.layers = list(drafter.feature_layers)
    return drafter


def _read_template(found: Inspection, drafter: Drafter, tokenizer: Any, kwargs: dict | None) -> None:
    # Here, because the package of cards reads checkpoints by this module.
    from .publishing.templates import described, template_mismatch

    settings = drafter.config
    found.target_revision = settings.target_revision
    if settings.chat_template_sha256 is not None:
        found.trained_on = described(settings.chat_template_sha256, settings.chat_template_kwargs)
    if tokenizer is not None and (mismatch := template_mismatch(drafter, tokenizer, kwargs or {})):
        found.warnings.append(mismatch)


def _note_tokenizer(found: Inspection, folder: Path) -> None:
    has = [f for f in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja") if (folder / f).exists()]
    if has:
        found.notes.append(f"carries {', '.join(has)}; the target's own tokenizer and chat template are what is used")
    else:
        found.notes.append("carries no tokenizer; the target's is used")
    if found.trained_on is None:
        found.notes.append(
            "drafts are best under the chat template and thinking mode the drafter was trained on; this checkpoint "
            "does not say which, so compare tau with and without the template if it is low"
        )
