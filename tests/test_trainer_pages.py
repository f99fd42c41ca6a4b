"""The pages on trainers and plans: both sides of the diff run, excerpts and numbers are those of their sources."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mural.errors import PlanError
from mural.plans import Plan

ROOT = Path(__file__).parents[1]
TRAINERS = (ROOT / "docs/how-to/your-trainer.md").read_text(encoding="utf-8")
CHOICE = (ROOT / "docs/how-to/choose-a-plan.md").read_text(encoding="utf-8")
DIFF = re.findall(r"^```diff\n(.*?)^```", TRAINERS, re.MULTILINE | re.DOTALL)[0].splitlines()
AXES = {
    "data": {"data": 2},
    "spatial": {"spatial": (2, 1)},
    "stage": {"stage": 2},
    "channel": {"channel": 2},
    "domain": {"domain": 2},
    "stream": {"stream": (64, 64)},
    "recompute, offload": {"recompute": "all", "offload": ("activations", "optimizer")},
}


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its header."""
    table = re.findall(r"^\|.*\|$", text[text.index(heading) :].split("\n\n## ")[0], re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def printed(folder: Path, dropped: str, *launcher: str) -> str:
    """What the script prints without the lines that a sign marks."""
    script = folder / "train.py"
    script.write_text("".join(f"{line[1:]}\n" for line in DIFF if not line.startswith(dropped)))
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_at_most_five_lines_of_a_script_change() -> None:
    assert sum(line.startswith("+") for line in DIFF) <= 5
    assert sum(line.startswith("-") for line in DIFF) <= 1


@pytest.mark.slow
def test_the_script_prints_the_same_before_and_after(tmp_path: Path) -> None:
    before = printed(tmp_path, "+")
    assert before.count("loss 0.") == 3
    assert printed(tmp_path, "-") == before
    assert printed(tmp_path, "-", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4") == before


def test_excerpts_are_those_of_the_examples() -> None:
    sources = ("examples/11_lightning.py", "examples/12_accelerate.py", "tests/trained_elsewhere.py")
    known = {line.strip() for name in sources for line in (ROOT / name).read_text(encoding="utf-8").splitlines()}
    blocks = re.findall(r"^```python\n(.*?)^```", TRAINERS, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in known] == []


def test_numbers_of_costs_are_those_of_the_benchmarks() -> None:
    """A number is one of a linked page, rounded to as many digits."""
    pages = {path.parent.name: path.read_text(encoding="utf-8") for path in ROOT.glob("benchmarks/*/README.md")}
    lines = [line for line in CHOICE.splitlines() if "/README.md)" in line]
    assert len(lines) >= 9
    for line in lines:
        text = " ".join(pages[name] for name in re.findall(r"benchmarks/(\w+)/README", line))
        found = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))]
        costs = line.strip("|").split("|")[-1] if line.startswith("|") else line
        for number in re.findall(r"\d+\.\d+|\d{2,}", re.sub(r"\(.*?\)", "", costs)):
            digits = len(number.partition(".")[2])
            assert any(round(value, digits) == float(number) for value in found), (number, line)


def test_what_goes_together_is_what_plans_take() -> None:
    header, _, *table = rows(CHOICE, "## What goes together")
    assert [header[0], *sorted(header[1:])] == ["", *sorted(AXES)]
    for name, *cells in table:
        for other, cell in zip(header[1:], cells, strict=True):
            if other == name:
                assert cell == ""
                continue
            plan = Plan(**(AXES[name] | AXES[other]))
            if cell.startswith("yes"):
                plan.check_runnable()
            else:
                assert cell == "no"
                with pytest.raises(PlanError):
                    plan.check_runnable()
