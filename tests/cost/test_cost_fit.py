"""Fitting, as the benchmark of costs does it: rooflines, trees as plain data, and a model of this machine in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mural.cost import load
from mural.cost.fitted_model import Model
from mural.cost.rates import Rates
from mural.cost.roofline import terms

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cost"
NAMES = ("fit", "host", "layers", "refit", "sweep", "trials")
RATES = Rates(float32=1e12, bfloat16=4e12, tf32=2e12, bandwidth=1e11, workspace=0, units=8)
GENERATOR = np.random.default_rng(0)


@pytest.fixture(scope="module")
def cost() -> Iterator[Any]:
    """The benchmark's modules; other benchmarks have some of the same names."""
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARK))
        yield SimpleNamespace(**{name: __import__(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def synthetic(cost: Any, case: Any) -> Any:
    """A layer whose times follow a rule: twice what the rates allow, three times in backward, plus a start."""
    record = {"case": case.encode(), "forward": 1.0, "backward": 1.0, "forward_bytes": 0, "backward_bytes": 0}
    work = cost.fit.sample(record, "cpu").work
    rule = {
        "forward": 5e-6 + 2 * sum(terms(work, RATES, back=False)[1:4]),
        "backward": 9e-6 + 3 * sum(terms(work, RATES, back=True)[1:5]),
    }
    noise = {phase: float(np.exp(GENERATOR.normal(0, 0.03))) for phase in rule}
    seconds = {phase: value * noise[phase] for phase, value in rule.items()}
    return cost.fit.Sample(work, seconds, {"forward": 0, "backward": 0})


@pytest.fixture(scope="module")
def fitted(cost: Any) -> Model:
    pytest.importorskip("sklearn")
    samples = [synthetic(cost, case) for case in cost.sweep.sweep("cpu", 260, seed=3)]
    return cost.fit.fit(samples, RATES, name="synthetic", kind="cpu")


def test_a_sweep_begins_as_a_longer_one_does(cost: Any) -> None:
    short, long = (cost.sweep.sweep("cpu", count) for count in (3, 9))
    assert short == long[:3]


def test_a_fit_finds_the_rule_behind_noisy_times(cost: Any, fitted: Model) -> None:
    errors: list[float] = []
    for each in (synthetic(cost, case) for case in cost.sweep.sweep("cpu", 60, seed=4)):
        for phase in ("forward", "backward"):
            if f"{each.work.family} {phase}" in fitted.curves:
                errors.append(abs(fitted.seconds([each.work], phase)[0] / each.seconds[phase] - 1))
    assert np.mean(errors) < 0.12


def test_a_model_is_the_same_after_a_file(cost: Any, fitted: Model, tmp_path: Path) -> None:
    path = tmp_path / "fitted.json"
    fitted.save(path)
    json.loads(path.read_text())  # plain JSON
    again = load(path)
    works = [synthetic(cost, case).work for case in cost.sweep.sweep("cpu", 20, seed=5)]
    assert again.seconds(works, "forward") == pytest.approx(fitted.seconds(works, "forward"), rel=1e-3)


def test_trees_are_those_of_scikit_learn(cost: Any) -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    table = GENERATOR.normal(size=(300, 4))
    target = table[:, 0] * 2 + np.sin(table[:, 1] * 3)
    trees = cost.fit.grown(table, target, np.ones(300))
    settings = cost.fit.SETTINGS | cost.fit.SMALL
    theirs = ensemble.HistGradientBoostingRegressor(**settings).fit(table, target, sample_weight=np.ones(300))
    fresh = GENERATOR.normal(size=(50, 4))
    assert trees.predict(fresh) == pytest.approx(theirs.predict(fresh), abs=1e-9)


def test_weights_are_robust_against_some_wrong_measurements(cost: Any) -> None:
    pytest.importorskip("scipy")
    rows = GENERATOR.uniform(0.1, 1.0, size=(200, 3))
    times_ = rows @ np.array([1.0, 0.0, 3.0])
    times_[:10] *= 20
    assert cost.fit.weighed(rows, times_) == pytest.approx([1.0, 0.0, 3.0], abs=0.1)


@pytest.mark.slow
def test_a_model_of_this_machine_is_measured_and_fitted(cost: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = cost.refit.refit("cpu", 0.1, tmp_path / "mine.json")
    found = load(path)
    assert found.kind == "cpu"
    assert {"conv forward", "conv backward"} <= found.curves.keys()
    assert found.about["layers"] > 10
