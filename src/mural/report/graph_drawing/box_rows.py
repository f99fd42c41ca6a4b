"""Rows: where the parts of a drawing stand, from top to bottom in forward order, and in which order side by side.

Each part stands below all that it reads. Parts with room to move stand where edges are short, and in a row they
follow the order in which least lines cross, as far as their neighbours' middle tells.

    nets  0 → 1, 2    1 → 3    2 → 3        rows  [0]  [1, 2]  [3]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SWEEPS = 8


@dataclass(frozen=True)
class Net:
    """One value and its readers among the parts of a block.

    `origin` says which value it is, `source` which part makes it (None: it comes from outside), `targets` which parts
    read it, and `leaves` whether it is read outside too.
    """

    origin: int
    source: int | None
    targets: tuple[int, ...]
    leaves: bool = False


def rows(parts: Sequence[int], nets: Sequence[Net]) -> list[list[int]]:
    """The parts in rows; they are given in forward order, so that each net's source stands before its targets.

    >>> rows([0, 1, 2, 3], [Net(0, 0, (1, 2, 3)), Net(1, 1, (3,)), Net(2, 2, (3,))])
    [[0], [1, 2], [3]]
    """
    row = shortened(parts, nets, longest_paths(parts, nets))
    used = {old: new for new, old in enumerate(sorted(set(row.values())))}
    placed: list[list[int]] = [[] for _ in used]
    for part in parts:
        placed[used[row[part]]].append(part)
    return ordered(placed, nets)


def longest_paths(parts: Sequence[int], nets: Sequence[Net]) -> dict[int, int]:
    """For each part, the most parts that lead to it one after another."""
    leads: dict[int, list[Net]] = {}
    for net in nets:
        if net.source is not None:
            leads.setdefault(net.source, []).append(net)
    row = dict.fromkeys(parts, 0)
    for part in parts:
        for net in leads.get(part, ()):
            for target in net.targets:
                row[target] = max(row[target], row[part] + 1)
    return row


def shortened(parts: Sequence[int], nets: Sequence[Net], row: dict[int, int]) -> dict[int, int]:
    """The rows after each part has moved down where this makes edges shorter: a reader close to where it is needed."""
    row = dict(row)
    made: dict[int, list[Net]] = {part: [] for part in parts}
    read: dict[int, list[Net]] = {part: [] for part in parts}
    for net in nets:
        if net.source is not None:
            made[net.source].append(net)
        for target in net.targets:
            read[target].append(net)

    def length(part: int, at: int) -> int:
        """How long the edges of a part are when it stands in that row; a net is as long as its farthest reader."""
        ends = (max(at if t == part else row[t] for t in net.targets) for net in read[part])
        starts = (row[net.source] if net.source is not None else -1 for net in read[part])
        below = (max(row[t] for t in net.targets) - at for net in made[part] if net.targets)
        return sum(ends) - sum(starts) + sum(below)

    for part in reversed(parts):
        nearest = [min(row[t] for t in net.targets) for net in made[part] if net.targets]
        lowest = min(nearest, default=row[part] + 1) - 1
        row[part] = min((row[part], lowest), key=lambda at: (length(part, at), at))
    return row


def ordered(placed: list[list[int]], nets: Sequence[Net]) -> list[list[int]]:
    """The rows, each in the order of its neighbours' middle, swept down and up; the shortest of all sweeps is kept."""
    row = {part: index for index, parts in enumerate(placed) for part in parts}
    beside: dict[int, list[int]] = {part: [] for part in row}
    for net in nets:
        for target in net.targets if net.source is not None else ():
            beside[net.source].append(target)  # type: ignore[index]
            beside[target].append(net.source)  # type: ignore[arg-type]
    best, least = placed, _width(placed, beside, row)
    for sweep in range(SWEEPS if any(len(parts) > 1 for parts in placed) else 0):
        placed = _swept(placed, beside, row, downwards=sweep % 2 == 0)
        width = _width(placed, beside, row)
        if width < least:
            best, least = placed, width
    return best


def _places(placed: list[list[int]]) -> dict[int, float]:
    return {part: i - (len(parts) - 1) / 2 for parts in placed for i, part in enumerate(parts)}


def _swept(
    placed: list[list[int]], beside: dict[int, list[int]], row: dict[int, int], downwards: bool
) -> list[list[int]]:
    place = _places(placed)
    new = list(placed)
    for index in range(len(placed)) if downwards else range(len(placed) - 1, -1, -1):

        def middle(part: int) -> float:
            seen = [place[other] for other in beside[part] if (row[other] < row[part]) == downwards]
            return sum(seen) / len(seen) if seen else place[part]

        new[index] = sorted(placed[index], key=middle)
        place.update(_places([new[index]]))
    return new


def _width(placed: list[list[int]], beside: dict[int, list[int]], row: dict[int, int]) -> float:
    """How far edges go sideways, those to near rows counting more."""
    place = _places(placed)
    return sum(
        abs(place[part] - place[other]) / abs(row[part] - row[other]) for part in beside for other in beside[part]
    )
