"""BatchNorm of each rank's piece of each micro-batch, as pipelines with data ranks have it elsewhere: by its rule."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mural
from ranks import run_on

IMAGES, PARTS, DATA = 8, 2, 2


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        nn.BatchNorm2d(5),
        nn.Conv2d(5, 2, 1),
    ).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(IMAGES, 3, 8, 8, dtype=torch.float64, generator=generator)
    return image, torch.randint(2, (IMAGES, 6, 6), generator=generator)


def reference() -> nn.Module:
    """Each rank's piece of each micro-batch alone, with buffers of its own, which are averaged in the end."""
    model, (image, target) = model_of(), batch()
    copies = [deepcopy(model) for _ in range(DATA)]
    for part in range(PARTS):
        images, targets = image.chunk(PARTS)[part], target.chunk(PARTS)[part]
        for copy, x, y in zip(copies, images.chunk(DATA), targets.chunk(DATA), strict=True):
            (F.cross_entropy(copy(x), y) * len(x) / IMAGES).backward()
    for name, p in model.named_parameters():
        p.grad = sum((copy.get_parameter(name).grad for copy in copies), torch.zeros_like(p))  # type: ignore[misc]
    for name, buffer in model.named_buffers():
        values = [copy.get_buffer(name) for copy in copies]
        buffer.copy_(values[0] if not buffer.is_floating_point() else torch.stack(values).mean(0))
    return model


def stepped(options: dict[str, Any]) -> float:
    """The largest difference from the reference."""
    plan = mural.Plan(data=DATA, stage=2, microbatches=PARTS, batchnorm="micro-rank", **options)
    pm, expected = mural.parallelize(model_of(), plan, loss=F.cross_entropy), reference()
    pm.step(*batch())
    found = [float((p.grad - expected.get_parameter(n).grad).abs().max()) for n, p in pm.named_parameters()]  # type: ignore[operator]
    state = pm.state_dict()
    found += [float((state[n].double() - b.double()).abs().max()) for n, b in expected.named_buffers()]
    return max(found)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        pytest.param({"schedule": "gpipe"}, marks=pytest.mark.slow),
        {"schedule": "gems"},
        pytest.param({"schedule": "gems", "gems": "lean"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_ranks_piece_of_each_micro_batch_alone(options: dict[str, Any]) -> None:
    assert max(run_on(4, stepped, options)) < 1e-10
