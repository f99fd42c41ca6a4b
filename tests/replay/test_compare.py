"""The comparer sees what it should, also when mural itself is changed on purpose, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mural.comm.exchange import ExchangeRoute
from mural.geometry import Cuts
from ranks import restart, run_on
from replay.compare import difference, kept
from replay.pairs import PAIRS
from replay.steps import Sections, on_rank, written
from replay.watch import replaced, watching

TEXT = """one line

[losses] ranks 0-1
1.29015189443698e+00

[messages of step 1] rank 0
←1:8 →1:8  # inputs
←1:768 →1:768  # convolution
←1:96 →1:96  # convolution backward
"""


def test_the_same_is_no_difference() -> None:
    assert difference(TEXT, TEXT) == ""


def test_what_helps_a_reader_is_not_compared() -> None:
    assert difference(TEXT, TEXT.replace("# convolution", "# halo of a convolution")) == ""


@pytest.mark.parametrize(("digits", "same"), [("443698", True), ("443699", True), ("143698", False)])
def test_the_last_digits_of_decimals_are_rounded(digits: str, same: bool) -> None:
    found = TEXT.replace("1.29015189443698e+00", f"1.29015189{digits}e+00")
    assert (difference(TEXT, found) == "") == same


def test_the_digits_of_a_whole_number_and_of_bits_are_not_rounded() -> None:
    bits = TEXT.replace("1.29015189443698e+00", "0x1.cef7413000000p+11")
    assert difference(bits, bits.replace("3000000p", "3000001p"))
    assert difference(TEXT, TEXT.replace("768", "769"))


def test_a_difference_names_its_section_and_what_the_message_is_for() -> None:
    found = TEXT.replace("←1:768 →1:768", "→1:768 ←1:768")
    assert difference(TEXT, found, "a pair").splitlines() == [
        "--- a pair, kept",
        "+++ a pair, found",
        "@@ -6,4 +6,4 @@ [messages of step 1] rank 0",
        " [messages of step 1] rank 0",
        " ←1:8 →1:8  # inputs",
        "-←1:768 →1:768  # convolution",
        "+→1:768 ←1:768  # convolution",
        " ←1:96 →1:96  # convolution backward",
    ]


def called_and_watched() -> None:
    """Collectives of torch, watched and after that."""
    with watching(torch.nn.Identity()) as watch:
        dist.all_reduce(torch.ones(1))
        dist.barrier()
    assert watch.messages
    dist.all_reduce(torch.ones(1))
    dist.barrier()


def test_ranks_that_were_watched_communicate_as_before() -> None:
    """Methods of process groups were put back without what binds them: later tests on these ranks failed in torch."""
    run_on(2, called_and_watched)


def rounded_down(cuts: Cuts, extent: int) -> Cuts:
    """Cuts in proportion whose bounds are rounded down: a change that no law notices."""
    return Cuts(tuple(bound * extent // cuts.extent for bound in cuts.bounds), cuts.owners)


def turned(original: Callable[..., ExchangeRoute]) -> Any:
    """A route whose messages are posted in the opposite order, which no law notices either."""

    def of(*args: Any) -> ExchangeRoute:
        route = original(*args)
        return replace(route, sends=route.sends[::-1], receives=route.receives[::-1])

    return staticmethod(of)


def changed(name: str, part: str) -> Sections:
    """What this rank does if mural is changed."""
    new = {"cuts": (Cuts, "scaled", rounded_down), "order": (ExchangeRoute, "of", turned(ExchangeRoute.of))}
    with replaced(*new[part]):
        return on_rank(name)


@pytest.mark.parametrize(
    ("part", "section"),
    [("cuts", "[boxes] rank"), pytest.param("order", "[messages of step 1] rank 1", marks=pytest.mark.slow)],
)
def test_a_change_of_mural_is_seen(part: str, section: str) -> None:
    name = "spatial-odd"
    ranks = PAIRS[name].plan.devices
    restart(ranks)  # they remember routes and cuts
    try:
        found = written(PAIRS[name], run_on(ranks, changed, name, part))
    finally:
        restart(ranks)
    shown = difference(kept("invariants", name).read_text(encoding="utf-8"), found, name)
    assert section in shown
    assert "[losses]" not in shown
    assert part == "cuts" or "[boxes]" not in shown
