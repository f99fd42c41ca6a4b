"""The page on windows, cuts and halos: its drawings are those of the script, its Python prints what it says."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from law import Grid
from ranks import run_on

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "concepts" / "windows-cuts-halos.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("draw_concepts")


def test_drawings_are_what_the_script_makes(script: ModuleType) -> None:
    made = {name: draw() for name, draw in script.DRAWINGS.items()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in script.FOLDER.glob("*.svg")}
    assert kept.keys() == made.keys()
    different = [name for name in made if kept[name] != made[name]]
    assert not different, f"{different}: run python docs/draw_concepts.py, and look at the result"
    assert all(f"(drawings/{name})" in TEXT for name in made)


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_examples_print_what_the_page_says(code: str, printed: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, PAGE.name, "exec"), {})
    assert output.getvalue() == printed


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == TEXT.count("```python") == 5


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)", TEXT)
    assert targets
    assert [t for t in targets if not (PAGE.parent / t).exists()] == []


def worked_example(image: list[int], kernel: list[int], gradient: list[int]) -> tuple[list[float], list[float], int]:
    """Output and input gradient of the worked example on real ranks, and the bytes this rank sends forward."""
    x = Grid((2, 1)).shard(torch.tensor(image, dtype=torch.float64).view(1, 1, -1, 1)).requires_grad_()
    weight = torch.rand(1, 1, 3, 3, dtype=torch.float64)
    weight[0, 0, :, 1] = torch.tensor(kernel)
    with x.mesh.transport.record() as record:
        y = F.conv2d(x, weight, stride=2, padding=1)
    (y * torch.tensor(gradient).view(1, 1, -1, 1)).sum().backward()
    return y.full().flatten().tolist(), x.grad.full().flatten().tolist(), record.bytes


def test_worked_example_on_two_ranks(script: ModuleType) -> None:
    found = run_on(2, worked_example, list(script.IMAGE), list(script.KERNEL), list(script.GRADIENT))
    output, gradient = [9, 12, 38, 31, 25], [2, 5, 4, 9, 6, 13, 8, 17, 10, 15]
    assert found == [(output, gradient, 0), (output, gradient, 8)]  # rank 1 sends one pixel of 8 bytes
    drawn = {name: re.findall(r">(\d+)<", script.DRAWINGS[name]()) for name in ("forward.svg", "backward.svg")}
    assert [str(n) for n in output] == drawn["forward.svg"][-10:-5]
    assert [str(n) for n in gradient] == drawn["backward.svg"][-10:]
