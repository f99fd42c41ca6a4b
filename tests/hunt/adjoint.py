"""The adjoint law: ⟨Fx, y⟩ = ⟨x, F*y⟩ for everything that sends messages, summed over all ranks.

It needs no reference: F is what mural does forward to a tensor of which each rank holds a piece, F* what its backward
does, and x and y are drawn, other ones on each rank. A message that is lost, sent twice, added where it should be
copied or brought to another place in backward than it came from in forward breaks the law. Weights, x and y are small
whole numbers, so that most sums are exact.

    family        F
    windows       what each rank needs of others: any intervals, also none, of any dim (`fetch`)
    layouts       another layout: other cuts, other axes, whole dims (`relayout`, `gather`, `full`)
    sums          tensors of ranks stacked, or added up (`stacked`, `merged`)
    operations    linear operations on sharded tensors: halo strips, pads, pools, moves, folds, reductions
    chains        two layers that share an exchange (fused halos)
    channels      layers split by inputs or outputs, all at once or in turns
    collectives   `mural.comm`: all-reduce is its own adjoint, reduce that of broadcast, gather that of reduce-scatter
    deliveries    what stages on other grids hand on, and their gradients, as moves
    tiles         windows that tiles read, and gradients that they add
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from typing import Any

import mural
from hunt.findings import Finding, Tally
from hunt.linear_maps import FAMILIES, GRIDS, Draw, Sides
from law import Grid
from ranks import RankError, run_on

TOLERANCE = 1e-10


def on_rank(family: str, seed: int, grid: Grid) -> Sides | str:
    """Both sides on this rank, or why mural refuses the case."""
    mesh = grid.mesh()
    draw = Draw(seed, mesh.rank)
    try:
        return FAMILIES[family][0](draw, mesh)
    except mural.MuralError as error:
        return f"{type(error).__name__}: {error}"


def grid_of(family: str, seed: int) -> Grid:
    """The grid of a case: one rank seldom."""
    draw = random.Random(seed + 1)
    world = draw.choice([n for n in (1, 2, 2, 3, 3, 4, 4, 4) if n >= FAMILIES[family][1]])
    return draw.choice(GRIDS[world])


def outcome(family: str, seed: int) -> Finding | bool:
    """Whether the law holds for a case: True, False if mural refuses it, or what is wrong."""
    grid = grid_of(family, seed)
    case = f"{family}, seed {seed}, spatial={grid.spatial}, data={grid.data}"

    def finding(kind: Any, detail: str) -> Finding:
        return Finding("adjoint", kind, case, detail, script_of(family, seed))

    try:
        found = run_on(grid.world, on_rank, family, seed, grid)
    except RankError as error:
        return finding("hung" if "no answer in" in str(error) else "crashed", str(error)[-3000:])
    words = [one for one in found if isinstance(one, str)]
    if words:
        wrong = len(words) < len(found) or any("PeerError" in word for word in words)
        return finding("crashed", f"refused on some ranks alone: {words[0]}") if wrong else False
    left, right, size = (sum(one[side] for one in found) for side in range(3))
    if abs(left - right) <= TOLERANCE * max(size, 1.0):
        return True
    return finding("incorrect", f"⟨Fx, y⟩ = {left!r}, ⟨x, F*y⟩ = {right!r}")


def script_of(family: str, seed: int) -> str:
    """A program that shows a case again, with tests/ on the path."""
    return f"from hunt.adjoint import outcome\n\nif __name__ == '__main__':\n    print(outcome({family!r}, {seed}))\n"


def search(seed: int, seconds: float, report: Callable[[str], None]) -> Tally:
    """The law for drawn cases of all families in turn, until the time is over."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    exact = refused = 0
    findings: list[Finding] = []
    while time.monotonic() < end:
        for family in FAMILIES:
            case = draw.randrange(10**9)
            try:
                found = outcome(family, case)
            except Exception:
                found = Finding("adjoint", "crashed", f"{family}, seed {case}", traceback.format_exc()[-3000:])
            if isinstance(found, Finding):
                findings.append(found)
                report(f"{found.kind}: {found.case}: {found.detail.splitlines()[-1]}")
            exact, refused = exact + (found is True), refused + (found is False)
            if time.monotonic() >= end:
                break
    return Tally("adjoint", exact, refused, tuple(findings))
