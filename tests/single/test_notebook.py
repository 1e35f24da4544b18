"""docs/notebook.ipynb runs and produces the documented results."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.runs import REPOSITORY

NOTEBOOK = REPOSITORY / "docs/notebook.ipynb"


def _result(cell: Any) -> Any:
    """Return the value of a cell's last expression."""
    (output,) = [o for o in cell.outputs if o.output_type == "execute_result"]
    return ast.literal_eval(output.data["text/plain"].replace("np.float64", ""))


@pytest.mark.slow
def test_docs_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "saved with its outputs"
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, resources=resources).execute()
    *_, started, losses, files, answer = [c for c in notebook.cells if c.cell_type == "code"]
    exit_code, step, loss = _result(started)
    assert (exit_code, step) == (0, 60) and loss < 0.1
    first, last = _result(losses)
    assert last < first / 10
    assert _result(files) == ("start", "end", [60], 2)
    assert abs(_result(answer) - 4) < 0.5
    said = "".join(o.text for o in started.outputs if o.output_type == "stream")
    assert "hvdtrain: step 60/60" in said  # the run's output is on the screen
