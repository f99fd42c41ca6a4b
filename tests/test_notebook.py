"""The notebook runs from top to bottom, and is stored with what it prints and draws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "in_a_notebook.ipynb"
CELLS: list[dict[str, Any]] = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
]
MARK = "---- end of a cell ----"


def stored(cell: dict[str, Any]) -> str:
    """What a cell printed when the notebook was stored."""
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def test_it_is_stored_with_its_outputs_and_pictures() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert all(stored(cell) for cell in CELLS if "print(" in "".join(cell["source"]))


@pytest.mark.slow
def test_it_runs_and_prints_what_it_is_stored_with(tmp_path: Path) -> None:
    """As one program that no file holds: a rank that imported it would start ranks again, which no notebook's does."""
    program = f"\nprint({MARK!r}, flush=True)\n".join("".join(cell["source"]) for cell in CELLS)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [text.strip() for text in done.stdout.split(MARK)]
    exact = [text for cell, text in zip(CELLS, printed, strict=True) if text == stored(cell).strip() != ""]
    assert any("Conv2d" in text for text in exact), "what capture prints is not what is stored: run the notebook again"
    assert any("gradients differ by" in text for text in printed)
    assert any("step 60/60  loss 0." in text for text in printed)
