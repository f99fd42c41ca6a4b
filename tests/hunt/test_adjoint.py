"""The adjoint law for a fixed selection of cases of each family; and a message that is lost in backward is found."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from hunt.adjoint import grid_of, on_rank, outcome, search
from hunt.linear_maps import CHAINS, FAMILIES, GRIDS, OPERATIONS, Draw, computed, sides
from law import Grid
from mural.comm import exchange
from mural.shard.halo.fuse import fusing
from ranks import restart, run_on

CASES = 12
SEED = 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_of_each_family(family: str) -> None:
    found = [outcome(family, seed) for seed in range(CASES)]
    assert not [one for one in found if not isinstance(one, bool)]
    assert sum(map(bool, found)) >= CASES // 2, "most cases are refused"


def sums_of(codes: list[str], grid: Grid) -> list[tuple[float, float, float]]:
    """Both sides of the law on this rank for every expression."""
    with fusing(False):
        return [computed(Draw(SEED + number, grid.mesh().rank), grid.mesh(), code) for number, code in enumerate(codes)]


@pytest.mark.parametrize("grid", [GRIDS[2][0], GRIDS[4][1]], ids=str)
def test_every_operation_and_chain(grid: Grid) -> None:
    codes = OPERATIONS + CHAINS
    for code, of_ranks in zip(codes, zip(*run_on(grid.world, sums_of, codes, grid), strict=True), strict=True):
        left, right, size = map(sum, zip(*of_ranks, strict=True))
        assert left == pytest.approx(right, abs=1e-10 * max(size, 1.0)), code


def lossy(*args: Any) -> torch.Tensor:
    """What goes home in backward, without what the rank kept itself."""
    grad, route, transport, name, shape = args
    found = exchange.returned(
        grad, exchange.post(transport, name, grad, route.receives, route.sends, shape), route,
        exchange.empty_like(grad, shape).zero_(),
    )  # fmt: skip
    for held, wanted in route.keeps:
        found[held] -= grad[wanted]
    return found


def broken(family: str, seed: int, grid: Grid) -> Any:
    """A case on this rank, if backward loses something."""
    with mock.patch.object(exchange, "give_back", lossy):
        return on_rank(family, seed, grid)


def test_what_backward_loses_is_found() -> None:
    found: list[bool] = []
    for seed in range(30):
        grid = grid_of("windows", seed)
        left, right, _ = map(sum, zip(*run_on(grid.world, broken, "windows", seed, grid), strict=True))
        found.append(left != right)
    assert sum(found) >= 5


def test_a_search_counts_its_cases_and_is_the_same_for_a_seed() -> None:
    tally = search(5, 1.0, print)
    assert tally.search == "adjoint"
    assert tally.exact >= len(FAMILIES) // 2
    assert not tally.findings


def crash(family: str, seed: int, grid: Grid) -> Any:
    """A rank that raises an error of Python's."""
    raise ZeroDivisionError(f"{family} {seed}")


def test_a_crash_is_a_finding_with_a_script() -> None:
    with mock.patch("hunt.adjoint.on_rank", crash):
        found = outcome("tiles", 1)
    assert not isinstance(found, bool)
    assert found.kind == "crashed"
    assert "ZeroDivisionError: tiles 1" in found.detail
    assert "outcome('tiles', 1)" in found.script
    restart(grid_of("tiles", 1).world)


def test_both_sides_of_a_map_that_is_no_adjoint_differ() -> None:
    draw = Draw(1, 0)
    x = draw.here((3, 4)).requires_grad_()
    left, right, _ = sides(draw, x, x * 2)
    assert left == right
    wrong, same, _ = sides(draw, x, (x * 2).detach() + x * 0)
    assert wrong != same
