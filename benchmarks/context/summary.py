"""What the records say of each arm: the rate that was chosen for it, and its scores over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.results import Record

from context.cases import Arm, Run, Settings
from context.grid import chosen

Way = Literal["tiles", "whole"]


@dataclass(frozen=True)
class Scores:
    """One number for each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation over the seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def median(self) -> float:
        """The middle seed."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        """Mean ± deviation, and in parentheses the median, the smallest and the largest.

        >>> str(Scores((0.5, 0.5, 0.8)))
        '0.600 ± 0.173 (0.500; 0.500 to 0.800)'
        """
        middle = f"{self.median:.3f}; {min(self.values):.3f} to {max(self.values):.3f}"
        return f"{self.mean:.3f} ± {self.deviation:.3f} ({middle})"


class Summary:
    """The records of one benchmark by arm."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.facts = next(r for r in reversed(records) if r["kind"] == "settings")
        known = Settings.__dataclass_fields__
        self.settings = Settings(**{k: frozen(v) for k, v in self.facts.items() if k in known})
        self.runs = [r for r in records if r["kind"] == "run"]
        self.rates = chosen(self.settings, self.runs)

    def of(self, arm: Arm) -> list[Record]:
        """The runs of an arm at its rate, in order of their seeds."""
        runs = [(Run(**r["case"]), r) for r in self.runs]
        found = [(run.seed, r) for run, r in runs if run.arm == arm and run.rate == self.rates[arm]]
        return [r for _, r in sorted(found, key=lambda pair: pair[0])]

    def ways(self, arm: Arm) -> tuple[Way, ...]:
        """How the models of an arm were run: on tiles too, unless the patch is the image."""
        return ("whole",) if arm.patch == self.settings.size else ("tiles", "whole")

    def scores(self, arm: Arm, way: Way, name: str = "accuracy") -> Scores:
        """Some score of an arm on the test images."""
        return Scores(tuple(r["test"][way][name] for r in self.of(arm)))

    def by_distance(self, arm: Arm, way: Way) -> list[Scores | None]:
        """The accuracy of an arm for each range of distances from the hilum; none where no nucleus is that far."""
        columns = zip(*(r["test"][way]["by_distance"] for r in self.of(arm)), strict=True)
        return [None if None in column else Scores(tuple(column)) for column in columns]

    def bound(self, arm: Arm) -> Record:
        """The most that can be known with the patch and the receptive field of an arm."""
        return next(r for r in reversed(self.records) if r["kind"] == "bound" and r["case"] == arm.encode())

    def whole(self, arm: Arm) -> Arm:
        """The arm with the same question and model that trains on whole images."""
        return Arm(arm.question, arm.depth, self.settings.size)


def frozen(value: Any) -> Any:
    """Lists as tuples, all the way down.

    >>> frozen([1, [2, "a"]])
    (1, (2, 'a'))
    """
    return tuple(frozen(v) for v in value) if isinstance(value, list) else value
