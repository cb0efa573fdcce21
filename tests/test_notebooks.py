"""The notebooks: valid, stored without outputs, and every cell runs (in tiny mode, on random models)."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_is_valid_and_stored_without_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for before, cell in zip(notebook.cells, notebook.cells[1:]):
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            assert before.cell_type == "markdown", f"no prose above {cell.source[:60]!r}"
            ast.parse(TransformerManager().transform_cell(cell.source))


@pytest.mark.slow
def test_runs_from_first_to_last_cell(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECDRAFT_TINY", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    notebook = read(path)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    if path.stem == "publish":
        card = next(entry["text/markdown"] for entry in data if "text/markdown" in entry)
        assert "x plain generate" in card and "`tiny-target`" in card
    else:
        assert any("image/png" in entry for entry in data)
    if path.stem == "quickstart":
        texts = [entry["text/html"] for entry in data if "pre-wrap" in entry.get("text/html", "")]
        assert len(texts) == 3 and any("<span" in text for text in texts)  # tokens that a drafter gave
