"""Finds the families: every folder or file beside this one that defines a Drafter registers itself when imported."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file

from .base import Context, Drafter, DrafterConfig, Session, TargetTokens, TargetView

__all__ = ["AutoDrafter", "Context", "Drafter", "DrafterConfig", "Session", "TargetView", "families", "register"]

_FAMILIES: dict[str, type[Drafter]] = {}


def register(drafter_class: type[Drafter]) -> type[Drafter]:
    """Class decorator: make the family known to AutoDrafter and transformers' Auto classes by its model_type."""
    config_class = drafter_class.config_class
    _FAMILIES[config_class.model_type] = drafter_class
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, drafter_class, exist_ok=True)
    AutoTokenizer.register(config_class, TargetTokens, exist_ok=True)
    return drafter_class


def families() -> dict[str, type[Drafter]]:
    """The registered families by model_type."""
    return dict(_FAMILIES)


class AutoDrafter:
    """Loads any drafter: a folder or Hub repository saved by this package, or published in a dialect a family reads.

    Many published drafters say `model_type: qwen3`; AutoModel would return a wrong, half-random model for them.
    """

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> Drafter:
        """`kwargs` as for AutoModel.from_pretrained (dtype, device_map, revision, token, ...).

        Raises ValueError when no family recognises the checkpoint, OSError when it cannot be found.
        """
        config = cls.read_config(name_or_path, **kwargs)
        if config.get("model_type") in _FAMILIES:
            return _FAMILIES[config["model_type"]].from_pretrained(name_or_path, **kwargs)
        for family in _FAMILIES.values():
            if family.dialect_of(config) is not None:
                return family.from_dialect(name_or_path, config, **kwargs)
        raise ValueError(
            f"{name_or_path} is no drafter this package can read (model_type {config.get('model_type')!r}, "
            f"architectures {config.get('architectures')}); families: {', '.join(sorted(_FAMILIES))}"
        )

    @staticmethod
    def read_config(name_or_path: str | Path, **kwargs: Any) -> dict:
        """The checkpoint's config.json as it stands."""
        hub = {k: kwargs[k] for k in ("revision", "token", "cache_dir", "force_download", "subfolder") if k in kwargs}
        try:
            file = cached_file(str(name_or_path), CONFIG_NAME, **hub)
        except OSError as error:
            # Offline, upstream says neither what was wanted nor of whom.
            raise OSError(f"cannot read the drafter {name_or_path}: {error}") from error
        if file is None:
            raise OSError(
                f"{name_or_path} holds no {CONFIG_NAME}, so it is no drafter; give the folder it was saved to"
            )
        try:
            return json.loads(Path(file).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not valid JSON ({error}); get a complete copy of the drafter") from None


def _discover() -> None:
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            importlib.import_module(f"{__name__}.{module.name}")


_discover()
