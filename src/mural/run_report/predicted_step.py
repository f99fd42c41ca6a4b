"""What is predicted for a step of a run on one device: a rehearsal under the run's plan, on tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from mural.cost.hardware import Hardware
from mural.data import open as open_source
from mural.data.image_sample import label_of, opened, sample_at
from mural.engine.division import Division
from mural.engine.fitting_tile import foreseen_step
from mural.engine.offloading import LEAST
from mural.engine.parallel import Parallel
from mural.engine.rehearsal import bytes_kept, rehearsed
from mural.engine.stage_ranks import StageRanks
from mural.planner.memory_mix import Given
from mural.ranks import Mesh
from mural.run_report.run_history import RunHistory
from mural.shard.generators import generators_kept
from mural.survey.machine_plan import time_limit
from mural.train.config import Config
from mural.train.configured_loss import make_loss
from mural.train.configured_samples import SOURCE, Split, padded
from mural.train.factory import make_meta_model

SECONDS = 30.0
"""How long a prediction may take."""
KEPT = {"Adam": 2.0, "AdamW": 2.0, "NAdam": 2.0, "RAdam": 2.0, "Adamax": 2.0, "RMSprop": 1.0, "Adagrad": 1.0}
"""The numbers that optimizers keep for each of a parameter's."""


@dataclass(frozen=True)
class Prediction:
    """The bytes that tensors of a step take at most, and its seconds where the device is known."""

    peak: int
    seconds: float | None
    words: str


def predicted_step(run: RunHistory, splits: Mapping[str, Split]) -> Prediction | None:
    """The prediction for the run's largest images; None for plans of several ranks, or where it cannot be made."""
    plan = run.config.plan
    if not run.starts or SOURCE not in splits or len(splits) > 1:
        return None
    start = run.starts[-1]
    if len(start.devices) != 1 or plan.devices > 1 or plan.piped or plan.offload:
        return None
    on_host, known = start.devices[0].startswith("CPU"), "H200" in start.devices[0]
    try:
        given = step_shapes(run.config, start.images[SOURCE], splits[SOURCE])
        with time_limit(SECONDS), generators_kept(torch.device("cpu")):
            peak, seconds = rehearsal(run.config, given, "cpu" if on_host else "h200")
    except Exception:  # whatever a model of the user's own may raise: a report goes without a prediction
        return None
    extents = " × ".join(map(str, given[0][0]))
    words = f"Predicted for a batch of {extents}: all tensors, with weights, gradients and optimizer state."
    words += " A CPU takes more: its kernels have buffers of their own." * on_host
    return Prediction(peak, seconds if known else None, words)


def step_shapes(config: Config, images: Mapping[str, Any], split: Split) -> list[Given]:
    """Shapes and types of image and target of a step on the largest images."""
    extents = padded(config.data.crop or images["largest"], config.data.multiple)
    target = sample_at(split.training, 0).target
    label, batch = label_of(target), config.data.batch
    kind = getattr(torch, config.model.dtype)
    if label is not None:
        wanted: Given = ((batch, *label.shape), kind if label.is_floating_point() else torch.int64)
    elif config.data.mask == "channels":
        with opened(target, "the first mask", open_source, len(extents)) as mask:
            wanted = ((batch, mask.shape[0], *extents), kind)
    else:
        wanted = ((batch, *extents), torch.int64 if config.data.mask == "classes" else kind)
    return [((batch, int(images["channels"]), *extents), kind), wanted]


def rehearsal(config: Config, given: Sequence[Given], hardware: str) -> tuple[int, float | None]:
    """The peak and the seconds of a step of the run."""
    model, plan = make_meta_model(config.model), config.plan
    loss = make_loss(config.loss, torch.device("cpu"), getattr(torch, config.model.dtype))
    numbers = KEPT.get(config.optimizer.name, 1.0 if config.optimizer.arguments.get("momentum") else 0.0)
    if plan.stream is None:
        lower = torch.bfloat16 if plan.precision == "bfloat16" else None
        trace = rehearsed(
            model, loss, given, hardware=Hardware.named(hardware), recompute=plan.recompute, lower=lower,
            numbers=numbers, least=LEAST["cuda"],
        )  # fmt: skip
        return max(trace.bytes), sum(trace.seconds)
    mesh, copy = Mesh.of_one(), deepcopy(model)
    held = Parallel(copy, plan, mesh, loss, 0, Division.whole(copy, StageRanks.of(plan, mesh)))
    step = foreseen_step(held, given, plan.stream, hardware=hardware)
    return step.peak.bytes + bytes_kept(model, numbers), step.cost.seconds() or 0.0
