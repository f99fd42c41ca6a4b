"""The model of a trained run for use: with the weights of its checkpoint, under any plan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mural.checkpoint import open_snapshot, restore
from mural.checkpoint.checkpoints import WAIT
from mural.comm.failure.agree import together
from mural.comm.groups import group_on_host
from mural.domain import SeparationNetwork
from mural.engine import Parallel
from mural.engine.alignment import graph_for, likely_shapes
from mural.errors import DataError, MuralError
from mural.parallelize import parallelize
from mural.prediction.trained_run import TrainedRun
from mural.ranks import Mesh
from mural.train.config import Config
from mural.train.configured_loss import make_loss
from mural.train.factory import make_model
from mural.train.start import device_of

UNCAPTURED = (MuralError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)
"""What a model may raise that cannot be captured."""


def built(run: TrainedRun, shape: tuple[int, ...]) -> nn.Module:
    """The run's model as it was before training, of which images (C, …) of that shape can be predicted."""
    model = make_model(run.config.model, run.config.seed)
    check_channels(model.predictor() if isinstance(model, SeparationNetwork) else model, shape, run.folder)
    return model


def loaded(run: TrainedRun, model: nn.Module, config: Config, mesh: Mesh, shape: tuple[int, ...]) -> Parallel:
    """The run's model under a plan, with the weights of its checkpoint. Collective.

    Of a separation network, the shared encoder and the head remain, which images of any domain go through.
    """
    device = device_of(config)
    group = group_on_host(mesh.transport, "predictions", WAIT) if mesh.world > 1 else None
    snapshot = open_snapshot(run.checkpoints, group, run.step)
    if isinstance(model, SeparationNetwork):
        restore(snapshot, model)
    with together(mesh, "the start of the prediction"):
        loss = make_loss(config.loss, device, getattr(torch, config.model.dtype))
    used = model.predictor() if isinstance(model, SeparationNetwork) else model
    pm = parallelize(used, config.plan, loss, mesh=mesh, device=device, seed=config.seed, image=shape)
    if used is model:
        restore(snapshot, pm.module)
    pm.eval()
    return pm


def check_channels(model: nn.Module, shape: tuple[int, ...], run: Path) -> None:
    """Raise if the model does not take images with so many channels, as far as its first convolution tells."""
    wanted = next((found[1] for found in likely_shapes(model)), shape[0])
    if wanted == shape[0]:
        return
    try:
        graph_for(model, shape)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            f"the images have {shape[0]} channels, but the model of {run} was trained on {wanted}: give images like "
            f"those of the training"
        ) from error


def gives_rows(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the model gives numbers for an image as a whole (N, K), and not for its positions."""
    used = model.predictor() if isinstance(model, SeparationNetwork) else model
    try:
        shapes = [value.shape for value in graph_for(used, shape).outputs]
    except UNCAPTURED:
        return False
    return len(shapes) == 1 and len(shapes[0]) == 2
