"""The fitted model of a device and its regression trees, as plain data: a prediction needs only numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mural.cost.call_features import CallFeatures
from mural.cost.rates import Rates
from mural.cost.roofline import mix, terms, variant
from mural.errors import PlanError
from mural.graph.facts import OTHER

# -- regression trees as plain data ------------------------------------------------------------------------------------


Numbers = NDArray[np.float64]
LEAF = -1


@dataclass(frozen=True)
class Trees:
    """A sum of trees, all in three lists: for each node its feature, its number, and how far on its right child is.

    A value that is at most the number goes left, to the next node, else right. A leaf has the feature −1, and its
    number is what it adds. `starts` says where each tree begins.

        0: x0 ≤ 3 ──┬── 1: leaf 0.5        feature (0, -1, -1)
                    └── 2: leaf 0.7        number (3, 0.5, 0.7)     right (2, 0, 0)
    """

    start: float
    starts: Sequence[int] = ()
    feature: Sequence[int] = ()
    number: Sequence[float] = field(default=(), repr=False)
    right: Sequence[int] = field(default=(), repr=False)

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Numbers, NDArray[np.intp]]:
        feature = np.asarray(self.feature, dtype=np.intp)
        at = np.arange(len(feature), dtype=np.intp)
        onward = at + np.asarray(self.right, dtype=np.intp)
        return np.asarray(self.starts, dtype=np.intp), feature, np.asarray(self.number, dtype=np.float64), onward

    def predict(self, rows: Numbers) -> Numbers:
        """The sum of all trees for each row of features.

        >>> Trees(1.0, [0], [0, -1, -1], [3.0, 0.5, 0.7], [2, 0, 0]).predict(np.array([[2.0], [4.0]]))
        array([1.5, 1.7])
        """
        starts, feature, number, onward = self._arrays
        if not len(starts):
            return np.full(len(rows), self.start)
        at = np.tile(starts, (len(rows), 1))
        place = np.arange(len(rows))[:, None]
        while True:
            which = feature[at]
            inner = which != LEAF
            if not inner.any():
                return self.start + number[at].sum(axis=1)
            left = rows[place, np.maximum(which, 0)] <= number[at]
            at = np.where(inner, np.where(left, at + 1, onward[at]), at)

    def encode(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "start": round(self.start, 6),
            "starts": list(self.starts),
            "feature": list(self.feature),
            "number": [float(f"{value:.5g}") for value in self.number],
            "right": list(self.right),
        }


# -- the model ---------------------------------------------------------------------------------------------------------


Phase = Literal["forward", "backward"]
SHORTEST = 5e-7
FAR = 6.0
"""Trees may correct a roofline by at most this factor, either way: far from all measurements they know nothing."""


@dataclass(frozen=True)
class Curve:
    """The time of a family in one direction: weights of the roofline's terms by variant, and trees on what is left."""

    weights: Mapping[str, Sequence[float]]
    features: Sequence[str]
    trees: Trees

    def roofline(self, work: CallFeatures, rates: Rates, phase: Phase) -> tuple[float, float]:
        """Seconds by the weights alone, and the mix of operations and bytes."""
        found = terms(work, rates, phase == "backward")
        weights = self.weights.get(variant(work)) or self._nearest(work)
        return max(SHORTEST, float(np.dot(weights, found))), mix(work, found)

    def _nearest(self, work: CallFeatures) -> Sequence[float]:
        """The weights of a variant that was measured, for one that was not: of the same type, if there is one."""
        width = variant(work).rsplit(" ", 1)[1]
        return next((w for name, w in self.weights.items() if name.endswith(width)), next(iter(self.weights.values())))

    def row(self, work: CallFeatures, seconds: float, mixed: float) -> list[float]:
        """The features that trees see."""
        return [*(work.features.get(name, 0.0) for name in self.features), float(np.log2(seconds)), mixed]

    def seconds(self, works: Sequence[CallFeatures], rates: Rates, phase: Phase) -> list[float]:
        """The time of each call."""
        lines = [self.roofline(work, rates, phase) for work in works]
        rows = np.array([self.row(w, *line) for w, line in zip(works, lines, strict=True)])
        corrected = np.exp(np.clip(self.trees.predict(rows), -np.log(FAR), np.log(FAR)))
        return [max(SHORTEST, line[0] * float(factor)) for line, factor in zip(lines, corrected, strict=True)]


@dataclass(frozen=True)
class Model:
    """What was fitted on one device; `curves` and `workspaces` by family and direction ("conv forward").

    A workspace is memory that a kernel takes while it runs, as a share of what it reads and writes. `host` are seconds
    that the host spends on a call, forward and backward, by family, on a device that works concurrently.
    """

    name: str
    kind: str
    rates: Rates
    curves: Mapping[str, Curve]
    workspaces: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    host: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def seconds(self, works: Sequence[CallFeatures], phase: Phase) -> list[float]:
        """The time of each call on the device itself; calls that only make views take none."""
        found = [0.0] * len(works)
        for family in sorted({work.family for work in works} - {"view"}):
            places = [i for i, work in enumerate(works) if work.family == family]
            curve = self.curves.get(f"{family} {phase}") or self.curves[f"{OTHER} {phase}"]
            for place, value in zip(places, curve.seconds([works[i] for i in places], self.rates, phase), strict=True):
                found[place] = value
        return found

    def workspace(self, works: Sequence[CallFeatures], phase: Phase) -> list[int]:
        """The bytes that kernels take for themselves while each call runs."""
        found = [0] * len(works)
        for family in sorted({work.family for work in works}):
            curve = self.workspaces.get(f"{family} {phase}")
            if curve is not None:
                places = [i for i, work in enumerate(works) if work.family == family]
                rows = np.array([curve.row(works[i], 1.0, 0.0) for i in places])
                for place, share in zip(places, curve.trees.predict(rows), strict=True):
                    found[place] = int(max(0.0, share) * (works[place].read + works[place].written))
        return found

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        data = {
            "name": self.name,
            "kind": self.kind,
            "about": dict(self.about),
            "rates": asdict(self.rates),
            "host": dict(self.host),
            "curves": {name: encoded(curve) for name, curve in self.curves.items()},
            "workspaces": {name: encoded(curve) for name, curve in self.workspaces.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, separators=(",", ":")) + "\n")

    @staticmethod
    def read(text: str) -> Model:
        """The model that was saved."""
        data = json.loads(text)
        return Model(
            name=data["name"],
            kind=data["kind"],
            rates=Rates(**data["rates"]),
            curves={name: decoded(curve) for name, curve in data["curves"].items()},
            workspaces={name: decoded(curve) for name, curve in data["workspaces"].items()},
            host={name: (pair[0], pair[1]) for name, pair in data["host"].items()},
            about=data["about"],
        )


def encoded(curve: Curve) -> dict[str, Any]:
    """A curve as JSON has it."""
    weights = {name: [float(f"{weight:.4g}") for weight in each] for name, each in curve.weights.items()}
    return {"weights": weights, "features": list(curve.features), "trees": curve.trees.encode()}


def decoded(data: Mapping[str, Any]) -> Curve:
    """A curve from JSON."""
    return Curve(data["weights"], data["features"], Trees(**data["trees"]))


def shipped() -> tuple[str, ...]:
    """The names of the models that come with the package."""
    folder = resources.files("mural.cost") / "data"
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


@lru_cache(maxsize=8)
def load(name: str | Path) -> Model:
    """A model that comes with the package ("h200", "cpu"), or that of a file."""
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        return Model.read(path.read_text())
    if str(name) not in shipped():
        raise PlanError(
            f"no fitted model is called {str(name)!r}: choose one of {', '.join(shipped())}, give the path of a .json "
            f"file, or fit one for this machine with: mural bench cost --refit FILE.json"
        )
    return Model.read((resources.files("mural.cost") / "data" / f"{name}.json").read_text())
