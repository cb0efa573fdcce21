"""Where a drafter comes from: the facts that training leaves beside the weights, and that its card tells."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

FILE = "training.json"


@dataclass
class Provenance:
    """How a drafter was made. None or an empty dict where it is not known; nothing here is ever guessed.

    recipe: the recipe's name. command: the command line that trained it. commit: of this package, "-dirty" when files
        differed from it. steps: optimiser steps of the saved weights.
    data: of the answers it was trained on, as the data folder's `specdraft.json` has it.
    chat_template: {"sha256": as `templates.template_sha256` gives it, "kwargs": what it was rendered with, such as
        {"enable_thinking": False}}.
    versions: package -> version. hardware: the machine, as `evaluation.provenance` describes it.
    seconds: wall-clock time of training. notes: lines for the card's reader, such as known limits.
    """

    recipe: str | None = None
    command: str | None = None
    commit: str | None = None
    steps: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    chat_template: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def here(cls, **known: Any) -> Provenance:
        """With the versions, commit and machine of this process; `known` are further fields."""
        from ..evaluation import provenance

        about = provenance()
        return cls(**{"commit": about["commit"], "versions": about["versions"], "hardware": about["machine"], **known})

    def save(self, folder: str | Path) -> Path:
        """Write `training.json` into a drafter's folder."""
        path = Path(folder) / FILE
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, name_or_path: str | Path, **hub: Any) -> Provenance | None:
        """Of a drafter's folder or Hub repository; None when it does not say. hub: as for `cached_file`.

        Raises ValueError when the file is not what `save` writes.
        """
        quiet = {
            key: False
            for key in (
                "_raise_exceptions_for_missing_entries",
                "_raise_exceptions_for_connection_errors",
                "_raise_exceptions_for_gated_repo",
            )
        }
        path = cached_file(str(name_or_path), FILE, **quiet, **hub)
        if path is None:
            return None
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            unknown = sorted(set(values) - {f.name for f in fields(cls)})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({error}); restore or remove it") from None
        if unknown:
            raise ValueError(f"{path} has fields this version does not know: {', '.join(unknown)}")
        return cls(**values)
