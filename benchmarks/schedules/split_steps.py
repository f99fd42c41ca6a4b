"""Steps of models in stages, cut as `splits.py` says: seconds and memory of a step, measured and predicted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from harness.counting import over_ranks
from harness.meters import resident
from measured import clean, machine, spent, timed
from splits import PLAN, Split, nets

import mural
from mural import cost
from mural.engine.timing import predicted_timeline


def measured(rank: int, split: Split, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of forward and backward of all micro-batches, every rank's waits and growth, and the predictions."""
    clean()
    net = nets(settings["quick"])[split.model]
    plan = replace(PLAN, stage=split.stages, cuts=split.names, microbatches=settings["microbatches"])
    base = resident("VmRSS")
    torch.manual_seed(0)
    pm = mural.parallelize(net.build(), plan, loss=F.cross_entropy, image=net.shape)
    image, labels = net.batch(plan.microbatches)
    # Not counted: in the first step the model is captured, in the second the lists are made that the others run.
    first, _ = (timed(pm, None, image, labels) for _ in range(2))
    clean()
    steps = [timed(pm, None, image, labels)]
    while len(steps) < settings["rounds"] and spent(steps) < settings["seconds"]:
        steps.append(timed(pm, None, image, labels))
    grown = over_ranks(resident("VmHWM") - base)
    answer: dict[str, Any] = {
        "seconds": [step.seconds for step in steps],
        "first": first.seconds,
        "losses": [step.loss for step in steps],
        "waited": over_ranks(statistics.mean(step.record.waited for step in steps)),
        "grown": grown,
        "microbatches": plan.microbatches,
    }
    return answer | (predictions(pm, image, settings["nodes"][split.model]) if rank == 0 else {})


def predictions(pm: Any, image: torch.Tensor, nodes: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The step by the fitted model at this machine's rates, and by what its layers took alone."""
    alone = [cost.Seconds(forward, backward) for forward, backward in nodes]
    return {
        "fitted": predicted_timeline(pm, image, machine()).makespan,
        "by_layers": predicted_timeline(pm, image, machine(), alone).makespan,
    }
