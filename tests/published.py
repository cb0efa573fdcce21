"""The published checkpoints in fixtures/, whole: what files share is stored once (fixtures/lent.json)."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

STORED = Path(__file__).parent / "fixtures"
FILE = "model.safetensors"
# Removed with the process.
_folder = tempfile.TemporaryDirectory(prefix="fixtures-")
FIXTURES = Path(_folder.name) / "fixtures"


def complete() -> None:
    """Copy the fixtures to FIXTURES and put lent tensors back: {folder: {tensor: [lending folder, its name there]}}."""
    shutil.copytree(STORED, FIXTURES)
    for folder, lent in json.loads((STORED / "lent.json").read_text(encoding="utf-8")).items():
        lenders = {lender: load_file(STORED / lender / FILE) for lender in {lender for lender, _ in lent.values()}}
        state = load_file(STORED / folder / FILE)
        state |= {name: lenders[lender][theirs].clone() for name, (lender, theirs) in lent.items()}
        save_file(state, FIXTURES / folder / FILE, metadata={"format": "pt"})


complete()
