"""Predictions for the held-out list beside what was measured: times by four predictors, and peaks of memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import measured
import numpy as np
from polynomial import Polynomial

from mural.cost import replay
from mural.cost.call_features import work_of
from mural.cost.fitted_model import Model, Trees
from mural.cost.memory_effects import effects
from mural.cost.memory_walk import Walk
from mural.cost.predict import Times, times

Record = dict[str, Any]
TYPICAL = {"cpu": min, "cuda": median}
"""As `mural.cost.clock` has it: on a CPU other programs only ever add."""


@dataclass(frozen=True)
class Row:
    """One entry of the held-out list: seconds and bytes, measured and predicted."""

    name: str
    shape: str
    dtype: str
    forward: float
    backward: float
    by: Mapping[str, tuple[float, float]]
    peak: int
    walked: int
    bare: int
    device: tuple[float, float] | None = None
    layers: tuple[tuple[str, float, float, float], ...] = ()
    """Convolutions measured alone: the direction, and seconds measured, predicted, and by the polynomial."""

    def error(self, name: str) -> float:
        """The relative error of a whole step's time."""
        return sum(self.by[name]) / (self.forward + self.backward) - 1

    @property
    def memory_error(self) -> float:
        return self.walked / self.peak - 1


def rows(device: str, records: Sequence[Record], model: Model, by_degree: Mapping[str, Polynomial]) -> list[Row]:
    """A row for each entry that was measured."""
    known = {record["name"]: record for record in records if record["kind"] == "held"}
    alone: dict[str, Any] = {}
    for record in records:
        if record["kind"] == "layers":
            alone |= record["found"]
    entries = [entry for entry in measured.entries(device) if measured.key_of(*entry) in known]
    return [row(entry, known[measured.key_of(*entry)], device, model, by_degree, alone) for entry in entries]


def row(
    entry: Any, record: Record, device: str, model: Model, by_degree: Mapping[str, Polynomial], alone: Mapping[str, Any]
) -> Row:
    """All predictions for one entry."""
    graph, wanted = measured.graph_of(*entry)
    found = effects(graph, wanted, device)
    works = [work_of(node, wanted) for node in graph.nodes]
    ours = times(graph, model, wanted, found)
    lines = times(graph, without_trees(model), wanted, found)
    convs = [i for i, work in enumerate(works) if work.family == "conv"]
    guessed = {phase: {i: by_degree[phase].seconds(works[i]) for i in convs} for phase in by_degree}
    spaces = {"forward": model.workspace(works, "forward"), "backward": model.workspace(works, "backward")}
    whole = (graph, found, wanted, 0, len(graph.nodes))
    walked = Walk(*whole, lambda node, phase: spaces[phase][node.id], device).peak(early=True)
    bare = Walk(*whole, lambda *_: 0, device).peak(early=True)
    name, shape, dtype = measured.key_of(*entry).split(" / ")
    layers = [
        (phase, alone[key][phase], getattr(ours, phase)[i], guessed[phase][i])
        for key, i in {replay.signature(graph.nodes[i], wanted): i for i in convs}.items()
        if key in alone
        for phase in ("forward", "backward")
    ]
    return Row(
        name, shape, dtype,
        TYPICAL[device](record["forward"]), TYPICAL[device](record["backward"]),
        {
            "fitted": ours.step(),
            "roofline": lines.step(),
            "polynomial": with_polynomial(ours, guessed).step(),
            "device": (sum(ours.forward), sum(ours.backward)),
        },
        record["peak"] - record["before"], walked.bytes, bare.bytes,
        (record["device_forward"], record["device_backward"]) if device == "cuda" else None,
        tuple(layers),
    )  # fmt: skip


def without_trees(model: Model) -> Model:
    """The weights of the roofline alone."""
    return replace(model, curves={name: replace(curve, trees=Trees(0.0)) for name, curve in model.curves.items()})


def with_polynomial(ours: Times, guessed: Mapping[str, Mapping[int, float]]) -> Times:
    """The times with those of convolutions from the polynomial."""
    ahead, back = list(ours.forward), list(ours.backward)
    for i, value in guessed["forward"].items():
        ahead[i] = value
    for i, value in guessed["backward"].items():
        back[i] = value
    return replace(ours, forward=tuple(ahead), backward=tuple(back))


def summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """The mean, the 90th percentile and the largest of absolute errors.

    >>> summary([0.1, -0.1, 0.3])
    (0.167, 0.26, 0.3)
    """
    sizes = np.abs(errors)
    return round(float(sizes.mean()), 3), round(float(np.quantile(sizes, 0.9)), 3), round(float(sizes.max()), 3)


def to_json(found: Sequence[Row]) -> str:
    """The rows for a file."""
    return json.dumps([vars(each) for each in found], default=list)
