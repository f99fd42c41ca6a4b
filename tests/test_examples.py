"""The examples run as their first lines say, and those that follow each other print the same losses."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SAME = (
    "01_one_device",
    "02_two_shards",
    "03_data_and_spatial",
    "04_own_dataset",
    "07_stages",
    "11_lightning",
    "12_accelerate",
)


def printed(name: str) -> str:
    """What an example prints, run by the command in its docstring."""
    script = FOLDER / f"{name}.py"
    ranks = re.search(r"torchrun --nproc-per-node (\d)", script.read_text())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks.group(1)] if ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_example_is_tried() -> None:
    found = {path.stem for path in FOLDER.glob("[0-9]*.py")}
    on_gpus = {"09_gpu_to_gpu"}  # tried by make test-gpu
    assert found == {*SAME, "05_resume_elsewhere", "06_own_pieces", "08_clinics", "10_domains"} | on_gpus


@pytest.mark.parametrize("script", sorted(FOLDER.glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_an_example_says_what_else_it_needs(script: Path) -> None:
    """Example 10 needed scikit-learn, and did not say so."""
    tree = ast.parse(script.read_text())
    places = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    places += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    roots = {place.partition(".")[0] for place in places}
    needed = roots - {*sys.stdlib_module_names, "mural", "torch", "numpy", "scenes"}
    said = re.search(r"pip install ([^)]*)", ast.get_docstring(tree) or "")
    assert not needed or said is not None, f"{script.name} needs {needed}"
    assert {"sklearn": "scikit-learn"}.get("".join(needed), "") in (said[1] if said else "")


@pytest.fixture(scope="module")
def one_device() -> list[str]:
    return re.findall(r"loss ([0-9.]+)", printed(SAME[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME[1:])
def test_examples_print_the_losses_of_one_device(name: str, one_device: list[str]) -> None:
    assert len(one_device) == 5
    assert re.findall(r"loss ([0-9.]+)", printed(name)) == one_device


@pytest.mark.slow
def test_a_run_that_resumes_elsewhere_prints_the_losses_of_one_that_never_stopped() -> None:
    found = re.findall(r"resumed ([0-9.]+)  never stopped ([0-9.]+)", printed("05_resume_elsewhere"))
    assert len(found) == 6
    assert [mine for mine, _ in found] == [other for _, other in found]


@pytest.mark.slow
def test_own_pieces_learn() -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed("06_own_pieces"))]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_clinics_learn_together() -> None:
    text = printed("08_clinics")
    assert len(re.findall(r"round \d+: .*; 1300 samples", text)) == 10
    accuracy = re.search(r"no clinic has: ([0-9.]+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9


@pytest.mark.slow
def test_a_domain_without_labels_is_learned() -> None:
    text = printed("10_domains")
    assert len(re.findall(r"loss ([0-9.]+)", text)) == 4
    found = re.search(r"phone: ([0-9.]+) of the held-out digits are right", text)
    assert found is not None
    assert float(found[1]) > 0.6
