"""Every notebook runs to its end. Nothing is written: kept outputs are those of a quiet machine."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbmake.nb_run import NotebookRun

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook(path):
    error = NotebookRun(path, default_timeout=180, kernel="python3").execute().error
    assert error is None, f"{error.summary}\n{error.trace}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_kept_outputs_are_clean(path):
    """All cells were run, none failed or wrote warnings."""
    assert path.stat().st_size < 400_000
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            assert cell.execution_count, cell.source
            kinds = [output.get("name", output.output_type) for output in cell.outputs]
            assert not {"stderr", "error"} & set(kinds), cell.source
