"""Mutants of the code that is arithmetic, and which of them its folder's own tests kill.

    python tests/hunt/mutants.py                       all folders, with a table and the survivors
    python tests/hunt/mutants.py geometry --every 20   every 20th mutant of a folder

Tests of a folder are collected once, in this process; what they do to a mutant is tried in a copy of it (`fork`), in
which the code of one function is another. A test runs if it reaches the changed line. Doctests count as the folder's.
Survivors that no test can kill are listed with the reason in `equivalent_mutants.txt`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(path) for path in (HERE.parent, ROOT / "src") if str(path) not in sys.path]
os.environ["HYPOTHESIS_PROFILE"] = "mutants"

import pytest  # noqa: E402
from _pytest.runner import runtestprotocol  # noqa: E402
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hunt.mutations import Mutant, mutants_of  # noqa: E402

settings.register_profile(
    "mutants", derandomize=True, database=None, deadline=None, max_examples=30, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
)  # fmt: skip

FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "geometry": (("src/mural/geometry/*.py",), ("tests/geometry",)),
    "pipeline": (
        tuple(f"src/mural/pipeline/{name}.py" for name in ("schedule", "gems", "transfers", "checker")),
        ("tests/pipeline/test_schedules.py", "tests/pipeline/test_checker.py", "tests/pipeline/test_timeline.py"),
    ),
    "collectives": (
        (
            "src/mural/collectives/rounds.py",
            "src/mural/collectives/ordered.py",
            "src/mural/collectives/algorithms/*.py",
        ),
        ("tests/collectives/test_rounds.py", "tests/collectives/test_rounds_price.py"),
    ),
    "shard": (
        ("src/mural/shard/layout.py", "src/mural/shard/place.py"),
        ("tests/shard/test_layouts.py", "tests/shard/test_places.py"),
    ),
}
"""The files of each folder that are mutated, and the tests that have to kill them: pure data, without ranks."""
EQUIVALENT = HERE / "equivalent_mutants.txt"
MEMORY, WAITING = 2**31, 300
"""Bytes and seconds that a mutant may take, whatever its tests took."""


@dataclass
class Result:
    """What became of the mutants of a folder."""

    mutants: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list[Mutant])
    seconds: float = 0.0

    @property
    def killed(self) -> int:
        """How many a test killed."""
        return self.mutants - self.equivalent - len(self.survivors)

    @property
    def part(self) -> float:
        """The part of those that can be killed."""
        return self.killed / max(1, self.mutants - self.equivalent)


class Hunter:
    """A pytest plugin that runs the collected tests once for each mutant, instead of once."""

    def __init__(self, files: Sequence[Path], every: int, say: Callable[[str], None]) -> None:
        self.files, self.every, self.say, self.result = files, every, say, Result()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try all mutants."""
        if session.testsfailed:
            raise RuntimeError("the tests could not be collected")
        begun, known = time.monotonic(), equivalents()
        loaded()
        warm_up()
        gc.disable()  # copies share memory as long as nobody goes through it
        reached, seconds = covered(session.items, self.files)
        slowest = sorted(session.items, key=lambda item: seconds[item.nodeid])
        every = [mutant for file in self.files for mutant in mutants_of(file, ROOT)]
        for mutant in every[:: self.every]:
            self.result.mutants += 1
            if mutant.key in known:
                self.result.equivalent += 1
                continue
            lines = reached[mutant.path]
            items = [item for item in slowest if mutant.line in lines[item.nodeid]]
            allowed = 2 + 3 * sum(seconds[item.nodeid] for item in items)
            if not items or not killed(items, mutant, allowed):
                self.result.survivors.append(mutant)
                self.say(f"{'survives' if items else 'not reached'}: {mutant}")
        self.result.seconds = time.monotonic() - begun
        return True


def warm_up() -> None:
    """Draw something, so that copies of this process find hypothesis ready."""

    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        data.draw(st.lists(st.integers(0, 5) | st.sampled_from([1, 2]), max_size=3))
        data.draw(st.tuples(st.booleans(), st.permutations([1, 2])))

    drawn()


def equivalents() -> set[tuple[str, ...]]:
    """The mutants that are listed as doing the same as the original."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    found = [tuple(part.strip() for part in line.split(" ¦ ")) for line in lines if line.startswith("src/")]
    return {one[:6] for one in found}


def covered(
    items: Sequence[pytest.Item], files: Sequence[Path]
) -> tuple[dict[str, dict[str, set[int]]], dict[str, float]]:
    """Per file, the lines that each test reaches, and its processor's seconds; found in a copy of this process."""
    names = {str(file): str(file.relative_to(ROOT)) for file in files}
    lines: dict[str, dict[str, set[int]]] = {name: defaultdict(set) for name in names.values()}
    seconds: dict[str, float] = {}
    for item in items:
        found = in_copy(functools.partial(lines_of, item, names))
        if not isinstance(found, tuple):
            raise RuntimeError(f"{item.nodeid} fails without any mutant: {found}")
        seconds[item.nodeid], reached = found
        for name, numbers in reached.items():
            lines[name][item.nodeid] |= numbers
    return lines, seconds


def lines_of(item: pytest.Item, names: dict[str, str]) -> tuple[float, dict[str, set[int]]] | str:
    """The processor's seconds of a test, and the lines that it reaches; or why it fails."""
    reached: dict[str, set[int]] = defaultdict(set)

    def each_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            reached[names[frame.f_code.co_filename]].add(frame.f_lineno)
        return each_line

    def each_call(frame: FrameType, _: str, __: Any) -> Any:
        if frame.f_code.co_filename not in names:
            return None
        reached[names[frame.f_code.co_filename]].add(frame.f_lineno)
        return each_line

    forget_results()
    sys.settrace(each_call)
    begun = time.process_time()
    wrong = failures(item)
    sys.settrace(None)
    return wrong or (time.process_time() - begun, dict(reached))


def in_copy(function: Callable[[], Any]) -> Any:
    """The result of a function, run in a copy of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(pickle.dumps(function()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else None


def killed(items: Sequence[pytest.Item], mutant: Mutant, allowed: float) -> bool:
    """Whether one of the tests fails with a mutant, or takes more than so many seconds of the processor."""
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, allowed)
        signal.alarm(WAITING)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        end = 1
        try:
            end = int(not all(map(passes, items))) if put_in(mutant) else 2
        finally:
            os._exit(end)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2:
        raise LookupError(f"{mutant.function} of {mutant.path} is not loaded as it is written: start again")
    return status != 0


@functools.cache
def loaded() -> tuple[dict[tuple[str, str, int], list[FunctionType]], list[Any]]:
    """The functions that are loaded, by file, name and line; and those that remember results."""
    functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    remembering: list[Any] = []
    for one in gc.get_objects():
        if type(one) is FunctionType:  # `isinstance` would ask objects that warn
            code = one.__code__
            functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)
        elif type(one) is functools._lru_cache_wrapper and str(one.__module__).startswith("mural"):
            remembering.append(one)
    return functions, remembering


def put_in(mutant: Mutant) -> bool:
    """Give a function its mutated code, wherever it is referred to; whether there is such a function."""
    found = loaded()[0].get((str(ROOT / mutant.path), mutant.function, mutant.code.co_firstlineno), [])
    for one in found:
        one.__code__ = mutant.code
    forget_results()
    return bool(found)


def forget_results() -> None:
    """Clear what functions remember of earlier calls."""
    for one in loaded()[1]:
        one.cache_clear()


def passes(item: pytest.Item) -> bool:
    """Whether a test passes."""
    return not failures(item)


def failures(item: pytest.Item) -> str:
    """Why a test fails; empty if it passes."""
    return "".join(one.longreprtext for one in runtestprotocol(item, log=False, nextitem=None) if one.failed)


def hunt(folder: str, every: int = 1, say: Callable[[str], None] = print) -> Result:
    """The mutants of a folder, or every so many of them."""
    sources, tests = FOLDERS[folder]
    files = [file for pattern in sources for file in sorted(ROOT.glob(pattern))]
    hunter = Hunter(files, every, say)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--doctest-modules"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--rootdir", str(ROOT)]
    code = pytest.main([*options, *map(str, files), *(str(ROOT / test) for test in tests)], plugins=[hunter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code!r}: run the tests of {folder} first")
    return hunter.result


def table(results: dict[str, Result]) -> Iterator[str]:
    """The folders in lines."""
    yield f"{'folder':14}{'mutants':>8}{'equivalent':>12}{'killed':>8}{'survivors':>11}{'killed, %':>11}{'seconds':>9}"
    for folder, one in results.items():
        numbers = f"{one.mutants:8}{one.equivalent:12}{one.killed:8}{len(one.survivors):11}"
        yield f"{folder:14}{numbers}{100 * one.part:11.1f}{one.seconds:9.0f}"


def main() -> int:
    """Hunt, each folder in a process of its own; 1 if fewer than 95% are killed somewhere."""
    parser = argparse.ArgumentParser(description="Mutants of arithmetic, and which of them tests kill.")
    parser.add_argument("folders", nargs="*", choices=[*FOLDERS, []], help="all unless given")
    parser.add_argument("--every", type=int, default=1, help="only every so many mutants")
    asked = parser.parse_args()
    os.nice(10)
    results = {}
    for folder in asked.folders or FOLDERS:
        results[folder] = in_copy(functools.partial(hunt_without_code, folder, asked.every))
    print("\n".join(table(results)))
    return int(any(one.part < 0.95 for one in results.values()))


def hunt_without_code(folder: str, every: int) -> Result:
    """A hunt whose result can be sent to another process."""
    from dataclasses import replace

    found = hunt(folder, every, functools.partial(print, flush=True))
    found.survivors = [replace(one, code=None) for one in found.survivors]  # type: ignore[arg-type]
    return found


if __name__ == "__main__":
    sys.exit(main())
