"""Fitting: from measured layers to the model of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from layers import Case

from mural.cost.call_features import CallFeatures, work_of
from mural.cost.fitted_model import LEAF, SHORTEST, Curve, Model, Numbers, Phase, Trees
from mural.cost.memory_effects import effects
from mural.cost.rates import Rates
from mural.cost.roofline import terms, variant
from mural.graph import capture
from mural.graph.differentiable import differentiable

PHASES: tuple[Phase, Phase] = ("forward", "backward")
SETTINGS: dict[str, Any] = {
    "loss": "absolute_error", "learning_rate": 0.07, "min_samples_leaf": 6, "l2_regularization": 0.5,
    "max_features": 0.4, "early_stopping": False, "random_state": 0,
}  # fmt: skip
SMALL: dict[str, Any] = {"max_iter": 60, "max_leaf_nodes": 8}
LARGE: dict[str, Any] = {"max_iter": 300, "max_leaf_nodes": 24}
MANY = 1000
"""From so many measurements on, a family gets more and larger trees."""
MOST = 32.0
"""The largest share that counts: unfolding an image for a kernel of 27 values takes about so much."""
WORTH = 0.02
"""Workspaces below this share of what a family reads and writes, on average, count as none."""


@dataclass(frozen=True)
class Sample:
    """One measured layer: its work, its seconds, and the bytes that its kernels took for themselves."""

    work: CallFeatures
    seconds: Mapping[Phase, float]
    workspace: Mapping[Phase, int]


def sample(record: Mapping[str, Any], kind: str) -> Sample:
    """A sample from a record of the sweep: the case, `forward` and `backward` in seconds, and their bytes."""
    case = Case.decode(record["case"])
    dtype: torch.dtype = getattr(torch, case.dtype)
    with torch.device("meta"):
        module = case.module()
    graph = capture(module, case.shapes, dtype)
    wanted = differentiable(graph, image=case.gradient)
    works = [work_of(node, wanted) for node in graph.nodes]
    main = max((w for w in works if w.family != "view"), key=lambda w: (w.operations, w.read + w.written))
    known = effects(graph, wanted, kind)
    ahead = sum(effect.forward.peak for effect in known)
    back = max((effect.backward.peak for effect in known if effect.backward is not None), default=0)
    return Sample(
        main,
        {"forward": record["forward"], "backward": record["backward"]},
        {
            "forward": max(0, record["forward_bytes"] - ahead),
            "backward": max(0, record["backward_bytes"] - back),
        },
    )


def fit(
    samples: Sequence[Sample],
    rates: Rates,
    *,
    name: str,
    kind: str,
    host: Mapping[str, tuple[float, float]] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Model:
    """The model of a device, from layers measured on it."""
    curves: dict[str, Curve] = {}
    spaces: dict[str, Curve] = {}
    for family in sorted({each.work.family for each in samples}):
        chosen = [each for each in samples if each.work.family == family]
        for phase in PHASES:
            measured = [each for each in chosen if each.seconds[phase] > 0]
            if measured:
                curves[f"{family} {phase}"] = fit_times(measured, rates, phase)
            space = fit_workspace(chosen, phase)
            if space is not None:
                spaces[f"{family} {phase}"] = space
    return Model(name, kind, rates, curves, spaces, host or {}, about or {})


def fit_times(samples: Sequence[Sample], rates: Rates, phase: Phase) -> Curve:
    """Weights of the roofline for each variant, then trees on the logarithm of what they leave."""
    works = [each.work for each in samples]
    seconds = np.maximum([each.seconds[phase] for each in samples], SHORTEST)
    rows = [terms(work, rates, phase == "backward") for work in works]
    names = [variant(work) for work in works]
    weights: dict[str, Sequence[float]] = {}
    for name in sorted(set(names)):
        places = [i for i, other in enumerate(names) if other == name]
        weights[name] = weighed(np.array([rows[i] for i in places]), seconds[places]).tolist()
    features = sorted({name for work in works for name in work.features})
    curve = Curve(weights, features, Trees(0.0))
    lines = [curve.roofline(work, rates, phase) for work in works]
    table = np.array([curve.row(work, *line) for work, line in zip(works, lines, strict=True)])
    left = np.log(seconds / np.array([line[0] for line in lines]))
    # What takes longer matters more in a sum.
    importance = np.clip(np.log10(seconds / 2e-6), 0.3, 3.0)
    return Curve(weights, features, grown(table, left, importance))


def fit_workspace(samples: Sequence[Sample], phase: Phase) -> Curve | None:
    """Trees for the share of what is read and written that kernels take for themselves; None where it is nothing."""
    works = [each.work for each in samples]
    share = np.array([each.workspace[phase] / max(1, each.work.read + each.work.written) for each in samples])
    if len(samples) < 20 or np.minimum(share, MOST).mean() < WORTH:
        return None
    features = sorted({name for work in works for name in work.features})
    curve = Curve({}, features, Trees(0.0))
    table = np.array([curve.row(work, 1.0, 0.0) for work in works])
    size = np.array([work.read + work.written for work in works], dtype=float)
    return Curve({}, features, grown(table, np.minimum(share, MOST), np.log2(size + 2)))


def weighed(rows: Numbers, seconds: Numbers) -> Numbers:
    """The weights, none negative, with the least relative error; measurements far off count less and less."""
    from scipy.optimize import nnls  # noqa: PLC0415

    importance = 1 / seconds
    found = np.zeros(rows.shape[1])
    for _ in range(6):
        found = nnls(rows * importance[:, None], seconds * importance)[0]
        off = np.abs(rows @ found / seconds - 1)
        importance = 1 / seconds / np.sqrt(np.maximum(off, 0.1))
    return found


def grown(table: Numbers, target: Numbers, importance: Numbers) -> Trees:
    """Boosted trees for the median of the target, as plain data."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit('fitting needs scikit-learn: pip install "mural-train[test]"') from error
    if len(target) < 12:
        return Trees(float(np.median(target)))
    size = LARGE if len(target) >= MANY else SMALL
    booster: Any = HistGradientBoostingRegressor(**SETTINGS, **size)
    booster.fit(table, target, sample_weight=importance)
    starts: list[int] = []
    feature: list[int] = []
    number: list[float] = []
    right: list[int] = []
    for (tree,) in booster._predictors:
        starts.append(len(feature))
        flatten(tree.nodes, 0, (feature, number, right))
    return Trees(float(np.ravel(booster._baseline_prediction)[0]), starts, feature, number, right)


def flatten(nodes: Any, at: int, into: tuple[list[int], list[float], list[int]]) -> None:
    """Append a tree below a node: the node, all to its left, all to its right."""
    feature, number, right = into
    place = len(feature)
    leaf = bool(nodes[at]["is_leaf"])
    feature.append(LEAF if leaf else int(nodes[at]["feature_idx"]))
    number.append(float(nodes[at]["value"] if leaf else nodes[at]["num_threshold"]))
    right.append(0)
    if not leaf:
        flatten(nodes, int(nodes[at]["left"]), into)
        right[place] = len(feature) - place
        flatten(nodes, int(nodes[at]["right"]), into)


def samples_of(records: Iterable[Mapping[str, Any]], kind: str) -> list[Sample]:
    """The samples of all records of a sweep; where memory was measured apart, as `spaces`, that counts."""
    records = list(records)
    spaces = {record["name"]: record for record in records if record["kind"] == "spaces"}
    keys = ("forward_bytes", "backward_bytes")
    found: list[Sample] = []
    for record in records:
        if record["kind"] == "sweep":
            apart = spaces.get(record.get("name", ""))
            found.append(sample({**record, **({key: apart[key] for key in keys} if apart else {})}, kind))
    return found
