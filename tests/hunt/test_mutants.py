"""Mutations are small, each at one place; and a sample of them is killed by the tests of their folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hunt.mutations import Mutant, mutants_of

SOURCE = '''
"""A module."""

LIMIT = 3


def middle(a: int, b: int = 2) -> int:
    """Text with 1 number."""
    if a < 0 or b == 0:
        raise ValueError(f"{a + 1} and {b - 1}")
    return (a + b) // 2


class Pair:
    """Two numbers."""

    def largest(self) -> int:
        """The larger one."""
        found = max(x for x, _ in zip((1,), (2,), strict=True) if not x)
        self.found = found
        return found
'''


@pytest.fixture
def mutants(tmp_path: Path) -> list[Mutant]:
    """The mutants of that module."""
    path = tmp_path / "module.py"
    path.write_text(SOURCE, encoding="utf-8")
    return list(mutants_of(path, tmp_path))


def test_each_change_is_of_one_place_and_texts_stay(mutants: list[Mutant]) -> None:
    changes = [(mutant.function, mutant.before, mutant.after) for mutant in mutants]
    assert [change[1:] for change in changes if change[0] == "middle"] == [
        ("a < 0 or b == 0", "not (a < 0 or b == 0)"), ("if a < 0 or b == 0:", "nothing"), ("a < 0 or b == 0", "And"),
        ("a < 0", "LtE"), ("0", "1"), ("0", "-1"), ("b == 0", "NotEq"), ("0", "1"), ("0", "-1"),
        ("(a + b) // 2", "-(-(a + b) // 2)"), ("a + b", "Sub"), ("2", "3"), ("2", "1"),
    ]  # fmt: skip
    words = {change[1:] for change in changes if change[0] == "Pair.largest"}
    assert ("not x", "x") in words
    assert ("self.found = found", "nothing") in words
    assert not any("True" in before for before, _ in words if "max" not in before)
    assert {mutant.path for mutant in mutants} == {"module.py"}


def test_code_can_be_put_in_the_place_of_the_functions(mutants: list[Mutant]) -> None:
    names: dict[str, object] = {}
    exec(compile(SOURCE, "module.py", "exec"), names)
    middle = names["middle"]
    results: list[object] = []
    for mutant in mutants:
        if mutant.function == "middle":
            middle.__code__ = mutant.code  # type: ignore[attr-defined]
            try:
                results.append(middle(1, 2))  # type: ignore[operator]
            except ValueError as error:
                results.append(str(error))
    assert len(results) == len([mutant for mutant in mutants if mutant.function == "middle"])
    assert results.count(1) < len(results) > results.count("2 and 1") > 0
    assert 2 in results


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["geometry", "shard", "collectives", "pipeline"])
def test_a_sample_is_killed(folder: str) -> None:
    program = Path(__file__).parent / "mutants.py"
    done = subprocess.run([sys.executable, str(program), folder, "--every", "25"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
