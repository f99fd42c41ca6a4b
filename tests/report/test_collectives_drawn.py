"""Drawings of collectives: what ranks hold, as a table, and the rounds as arrows."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from mural.collectives.algorithms import butterfly, halving_doubling, ring, tree
from mural.collectives.ordered import ordered
from mural.collectives.rounds import ChunkSend, Collective
from mural.errors import PlanError
from mural.report.holdings import text

FOLDER = Path(__file__).parents[2] / "benchmarks" / "allreduce"


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("rounds_figure")


def test_a_table_of_what_ranks_hold() -> None:
    assert text(tree(4)).split("\n") == [
        "tree: 4 ranks, 1 chunk",
        "           rank 0    rank 1    rank 2    rank 3",
        "begin      0         1         2         3",
        "round 1    01        1         23        3",
        "round 2    0123      1         23        3",
        "round 3    0123      1         0123      3",
        "round 4    0123      0123      0123      0123",
    ]
    with pytest.raises(PlanError, match="draw the one that it was made from"):
        text(ordered(ring(3)))


@pytest.mark.parametrize("collective", [tree(4), butterfly(8), ring(4), halving_doubling(5), ordered(ring(3))])
def test_a_drawing_has_an_arrow_for_each_message(figure: ModuleType, collective: Collective) -> None:
    root = ElementTree.fromstring(figure.svg(collective))
    space = "{http://www.w3.org/2000/svg}"
    pairs = {(n, s.source, s.destination) for n, sends in enumerate(collective.rounds) for s in sends if not s.local}
    assert len(list(root.iter(f"{space}polygon"))) == len(pairs)
    assert len(list(root.iter(f"{space}circle"))) == collective.ranks * (len(collective.rounds) + 1)


def test_a_message_names_its_chunks(figure: ModuleType) -> None:
    assert figure.chunks_of([ChunkSend(0, 1, 2, True), ChunkSend(0, 1, 3, True)]) == "2–3"
    assert figure.chunks_of([ChunkSend(0, 1, 2, True)]) == "2"


def test_the_drawings_of_the_benchmark_are_what_it_makes(figure: ModuleType) -> None:
    for name, collective in {"tree": tree(4), "butterfly": butterfly(8), "ring": ring(4)}.items():
        assert (FOLDER / "figures" / f"{name}.svg").read_text(encoding="utf-8") == figure.svg(collective)
