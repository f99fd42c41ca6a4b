"""The page of the five documents: it is what its rows make now, and every number of ours comes from results."""

from __future__ import annotations

import doctest
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mural.cli.bench_verb import benchmarks

ROOT = Path(__file__).parents[1]
RESULTS = {"records": [{"kind": "step", "ranks": n, "case": {"net": "unet"}, "seconds": [n, 3 * n]} for n in (1, 2)]}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("generate_documents")


@pytest.fixture
def lookup(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The lookups, on one small file of results."""
    module = importlib.import_module("documents.lookup")
    monkeypatch.setattr(module, "results", lambda file: RESULTS)
    return module


def rows(script: ModuleType) -> list[Any]:
    return [row for document in script.DOCUMENTS for row in document.rows]


def options_of(benchmark: str) -> str:
    """Where the options of a benchmark are written."""
    folder = ROOT / "benchmarks"
    shared = [folder / "harness" / name for name in ("options.py", "selection.py")]
    files = [*(folder / benchmark).glob("*.py"), *shared]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_is_what_the_rows_make_now(script: ModuleType) -> None:
    kept = script.PAGE.read_text(encoding="utf-8")
    assert script.page() == kept, "run python docs/generate_documents.py, and read the rows that changed"


def test_numbers_of_ours_come_from_results(script: ModuleType) -> None:
    lookup, row_module = (importlib.import_module(f"documents.{name}") for name in ("lookup", "row"))
    for row in rows(script):
        for text in (text for text in (row.ours, row.then) if isinstance(text, row_module.Text)):
            found = [leaf for number in text.numbers.values() for leaf in lookup.leaves(number)]
            assert found, row.place
            assert all(isinstance(leaf, lookup.Field | lookup.Cell) for leaf in found), row.place


def test_nothing_about_mural_has_a_number_that_was_typed(script: ModuleType) -> None:
    labels = importlib.import_module("documents.labels")
    typed = {words: labels.unexplained(words) for row in rows(script) for words in row.by_hand}
    assert {words: found for words, found in typed.items() if found} == {}
    used = "\n".join(typed)
    assert [label for label in labels.LABELS if label not in used] == [], "labels that no row has"
    assert [label for label in labels.LABELS if "." in label] == [], "a number with decimals is no setting"


def test_numbers_of_a_text_are_those_of_its_template(script: ModuleType) -> None:
    for row in rows(script):
        for text in row.texts:
            assert text.words.count("…") >= len(text.numbers), row.place
            assert [name for name in text.numbers if f"{{{name}" not in text.template] == [], row.place


def test_every_verdict_has_what_it_needs(script: ModuleType) -> None:
    verdict = importlib.import_module("documents.row").Verdict
    for row in rows(script):
        assert isinstance(row.verdict, verdict), row.place
        assert row.why or row.verdict not in (verdict.NOT_COMPARABLE, verdict.NOT_MEASURED), row.place
        assert row.command or row.verdict is verdict.NOT_COMPARABLE, row.place
        assert str(row.ours) != "–" or row.verdict in (verdict.NOT_COMPARABLE, verdict.NOT_MEASURED), row.place


def test_what_is_not_measured_yet_is_not_in_the_results(script: ModuleType) -> None:
    """When it is, the row needs its number, which `then` has, and another verdict."""
    values = importlib.import_module("documents.lookup").values
    assert [row.place for row in rows(script) if row.awaits is not None and values(row.awaits)] == []
    assert [row.place for row in rows(script) if row.then is not None and row.then.known] == []


def test_a_row_says_what_was_awaited_once_it_is_there(lookup: Any) -> None:
    module = importlib.import_module("documents.row")
    about = ("table 1", "theirs", "–", "mural bench some", module.Verdict.NOT_MEASURED, "not run")
    for ranks, said in ((2, "4 s"), (3, "–")):
        seconds = lookup.record("any/file.json", "seconds", lookup.median, ranks=ranks)
        row = module.Row(*about, then=module.say("{seconds:.0f} s", seconds=seconds))
        assert str(row.said) == said


def test_a_file_that_is_not_there_has_no_values() -> None:
    module = importlib.import_module("documents.lookup")
    assert module.values(module.record("allreduce/no-such-file.json", "seconds")) == []


def test_every_command_names_something_that_exists(script: ModuleType) -> None:
    known = benchmarks(ROOT / "benchmarks")
    for row in rows(script):
        words = shlex.split(row.command)
        if words[:2] == ["mural", "bench"]:
            assert words[2] in known, row.command
            options = [word.removeprefix("--") for word in words if word.startswith("--")]
            written = options_of(words[2])
            assert [o for o in options if f'"--{o}"' not in written and f'"{o}"' not in written] == [], row.command
        else:
            assert not words or words[0] in ("pytest", "python", "mpirun"), row.command
        files = [word for word in words if word.endswith((".py", ".json"))]
        assert [file for file in files if not (ROOT / file).is_file()] == [], row.command


# ---------------------------------------------------------------------------------------------------------- the lookups


def test_a_field_selects_and_reduces(lookup: Any) -> None:
    two = lookup.record("any/file.json", "seconds", lookup.median, kind="step", ranks=2, case__net="unet")
    one = lookup.Field("any/file.json", ("records", {"ranks": 1}, "seconds", 0))
    assert lookup.value(two) == 4
    assert lookup.value((two - one) / one * 100) == 300
    assert list(lookup.leaves(two / one + 1)) == [two, one]


@pytest.mark.parametrize(("field", "has"), [("seconds", {"ranks": 3}), ("minutes", {"ranks": 2})])
def test_what_is_not_there_is_an_error_and_no_zero(lookup: Any, field: str, has: dict[str, int]) -> None:
    with pytest.raises(LookupError, match="has nothing at"):
        lookup.value(lookup.record("any/file.json", field, sum, **has))


def test_several_values_need_to_be_reduced(lookup: Any) -> None:
    with pytest.raises(LookupError, match="2 values where there should be one"):
        lookup.value(lookup.record("any/file.json", "ranks", kind="step"))


def test_a_cell_is_found_by_its_row_and_column(lookup: Any) -> None:
    found = lookup.Cell("cost", "cuda", ("time of a step", "**fitted**"), "mean error")
    assert 0 < lookup.value(found) < 1
    with pytest.raises(LookupError, match="has no"):
        lookup.value(lookup.Cell("cost", "cuda", ("time of a step", "by hand"), "mean error"))


def test_digits_that_are_no_label_are_found(script: ModuleType) -> None:
    labels = importlib.import_module("documents.labels")
    assert labels.unexplained("16 GiB on 8 ranks at 512², as VGG-19 on an H200") == []
    assert labels.unexplained("1.5 times on 8 ranks, 3 of 8.25, 5128² on 18 ranks") == ["1.5", "3", "25", "5128", "18"]


@pytest.mark.parametrize("name", ["labels", "lookup", "row"])
def test_examples_of_the_modules(script: ModuleType, name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"documents.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
