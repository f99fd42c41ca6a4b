"""The pages: drawings are those of the script, Python prints what a page says, links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from first_hour import PAGE, commands
from law import Grid
from mural.errors import DISTRIBUTION
from mural.train.config import Config
from ranks import run_on

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PRINTING = {"windows-cuts-halos": 5, "collectives": 4}
"""Concept pages whose every example stands above what it prints, and how many there are."""
TEXTS = {page: (DOCS / "concepts" / f"{page}.md").read_text(encoding="utf-8") for page in PRINTING}
EXAMPLES = [
    (page, *example)
    for page, text in TEXTS.items()
    for example in re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
]
PAGES = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md"), *DOCS.parent.glob("benchmarks/**/*.md")]


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
    assert all(f"(drawings/{name})" in TEXTS["windows-cuts-halos"] for name in made)


@pytest.mark.parametrize(("page", "code", "printed"), EXAMPLES)
def test_examples_print_what_the_page_says(page: str, code: str, printed: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, page, "exec"), {})
    assert output.getvalue() == printed


def test_every_example_is_run() -> None:
    for page, count in PRINTING.items():
        assert [name for name, *_ in EXAMPLES].count(page) == TEXTS[page].count("```python") == count


def test_the_tour_reads_six_files_of_under_900_lines_and_its_examples_run() -> None:
    text = (DOCS / "tour.md").read_text(encoding="utf-8")
    six = text[text.index("## The six files") : text.index("## One image through `mural train`")]
    files = re.findall(r"^### \d\. .*\n\n\[[^\]]+\]\(([^)]+)\)", six, re.MULTILINE)
    assert len(files) == 6
    assert sum(len((DOCS / name).read_text(encoding="utf-8").splitlines()) for name in files) < 900
    for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, "tour", "exec"), {})
        assert output.getvalue().splitlines() == re.findall(r"^# (.*)$", code, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_links_lead_somewhere(page: Path) -> None:
    plain = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)", plain)
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


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


def test_the_readme_types_what_the_first_hour_types() -> None:
    """tests/first_hour.py runs that page; the README had folders that `write_synthetic` did not make."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(commands(text)) < set(commands(PAGE.read_text(encoding="utf-8")))
    assert len(text.splitlines()) <= 150
    (plan,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert Config.of(tomllib.loads(plan)).plan.spatial == (2, 2)


def test_every_hint_installs_the_distribution_of_this_project() -> None:
    """`pip install mural` brings a package of someone else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    wrong = [p for p in files if re.search(r"pip install [\"']?mural\b(?!-train)", p.read_text(encoding="utf-8"))]
    assert wrong == []
    assert not any(
        re.match(r"mural\b(?!-train)", need) for e in project["optional-dependencies"].values() for need in e
    )
