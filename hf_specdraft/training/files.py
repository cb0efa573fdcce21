"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def write_whole(path: Path, write: Callable[[Path], Any], remedy: str = "make room on the disk and try again") -> None:
    """Let `write` write a file beside `path`, then put it in its place. OSError, with what was there before and no half
    of a file, when that fails."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {path.name} to {path.parent} ({error}); {remedy}") from error
    finally:
        partial.unlink(missing_ok=True)
