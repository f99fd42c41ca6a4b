"""Timelines of a step in stages: what is predicted and what was measured name the same actions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mural
from mural import cost
from mural.engine.timing import draw_gantt, measured_spans, predicted_timeline
from mural.errors import ConfigError, PlanError
from mural.pipeline.schedule import Action
from ranks import run_on


def timed(path: Path) -> tuple[list[tuple[int, Action]], list[tuple[int, Action]], float, bool]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1) for i in range(6)]
    plan = mural.Plan(stage=2, schedule="1f1b", microbatches=3, cuts="time")
    pm = mural.parallelize(nn.Sequential(*layers), plan, F.mse_loss)
    image = torch.randn(3, 3, 16, 16)
    pm.step(image, torch.randn(3, 4, 16, 16))
    measured = measured_spans(pm)  # type: ignore[arg-type]
    predicted = predicted_timeline(pm, image)  # type: ignore[arg-type]
    given = [cost.Seconds(1.0, 2.0)] * 6  # three nodes a stage: 3 s forward, 6 s backward, of 3 micro-batches
    assert predicted_timeline(pm, image, seconds=given).makespan == pytest.approx(36.0, rel=1e-3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="5 seconds were given for 6 nodes"):
        predicted_timeline(pm, image, seconds=given[1:])  # type: ignore[arg-type]
    draw_gantt(pm, image, path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"end in \.html"):
        draw_gantt(pm, image, path.with_suffix(".pdf"))  # type: ignore[arg-type]
    good = all(0.0 <= span.start <= span.end for span in measured)
    actions = [sorted((span.seat, span.action) for span in spans) for spans in (measured, predicted.spans)]
    return actions[0], actions[1], predicted.makespan, good


def test_predicted_and_measured_actions_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "gantt.html"
    for measured, predicted, makespan, good in run_on(2, timed, path):
        assert measured == predicted
        assert len(measured) == 2 * 2 * 3
        assert makespan > 0
        assert good
    drawn = path.read_text()
    assert drawn.startswith("<!doctype html>")
    assert drawn.count("forward of stage 1, micro-batch 2: ") == 2  # predicted and measured
