"""What split layers send: counted where it is sent, beside the formulas of document `004` and mural's own."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from harness.vision import torchvision

import mural
from hybrid_modules import master_worker, payload, traffic
from mural.models import LeNet5
from ranks import run_on

Plan = mural.Plan
LINEAR = ("classifier.1", "classifier.3", "classifier.5")


def lenet() -> list[Any]:
    return payload.sizes(LeNet5(), (1, 32, 32))


def test_the_document_counts_images_not_nodes() -> None:
    """61,706 / 1,790 = 34.5: with one image on each node, up to 34 nodes; with more images, fewer."""
    layers = lenet()
    assert (sum(s.parameters for s in layers), sum(s.kept for s in layers)) == (61706, 1790)
    assert payload.crossover(layers) == pytest.approx(34.47, abs=0.01)
    for nodes in (2, 34, 35, 64):
        less = payload.model_parallel(layers, nodes, images=nodes).values < payload.data_parallel(layers, nodes).values
        assert less == (nodes < 34.5)
    assert payload.model_parallel(layers, 2, images=200).values > payload.data_parallel(layers, 2).values
    assert payload.model_parallel(layers, 4, images=1).messages == 2 * 4 * 5


def test_examples_of_the_formulas_hold() -> None:
    assert [doctest.testmod(module).failed for module in (payload, master_worker)] == [0, 0]


def test_the_large_models_are_counted_without_memory() -> None:
    with torch.device("meta"):
        models = [(torchvision.models.alexnet(), 61_100_840, 3), (torchvision.models.vgg19(), 143_667_240, 3)]
    for model, parameters, linear in models:
        layers = payload.sizes(model, (3, 224, 224))
        assert sum(s.parameters for s in layers) == parameters
        held = sum(s.parameters for s in layers[-linear:])
        assert held > 0.85 * parameters
        assert sum(s.kept for s in layers[-linear:]) < 0.06 * sum(s.kept for s in layers)
        # The hybrid: with 128 images on eight ranks, splitting pays for the linear layers alone.
        assert [s.name for s in layers if payload.pays(s, 128, 8)] == [s.name for s in layers[-linear:]]


def counted(plan: mural.Plan, images: int) -> tuple[list[Any], int]:
    pm = mural.parallelize(LeNet5(classes=12), plan)
    x, target = torch.randn(images, 1, 32, 32), torch.arange(images) % 10
    return traffic.traffic(pm, x, target), traffic.value_bytes(pm)


@pytest.mark.parametrize(
    ("plan", "images"),
    [
        (Plan(channel=2), 4),
        (Plan(channel=4, channel_exchange="rank"), 8),
        (Plan(channel=2, data=2), 8),
        (Plan(channel=4, channel_layers=tuple(f"{name}:input" for name in LINEAR)), 4),
    ],
    ids=str,
)
def test_counters_meet_the_formulas(plan: mural.Plan, images: int) -> None:
    (found, width), *_ = run_on(plan.devices, counted, plan, images)
    layers = {s.name: s for s in payload.sizes(LeNet5(classes=12), (1, 32, 32))}
    by = "output" if plan.channel_layers == "linear" else "input"
    ranks, groups = plan.channel, plan.data
    for layer in found:
        if layer.name in LINEAR:
            size = layers[layer.name]
            turns = plan.channel_exchange != "batch"
            assert layer.bytes == width * groups * payload.split_values(size, images // groups, ranks, by, turns=turns)
            assert layer.messages == groups * (5 if turns else 4) * ranks * (ranks - 1)
            shares = 0 if groups == 1 and by == "output" else size.parameters * groups
            bias = size.outputs * (ranks * groups if by == "input" else 0)
            assert layer.gradients == (bias if groups == 1 else shares)
        elif layer.name:
            assert (layer.messages, layer.gradients) == (0, plan.devices * layers[layer.name].parameters)


def total(plan: mural.Plan, images: int) -> tuple[int, int]:
    """Values that all ranks send for the linear layers, split or not: the messages', or a ring's for gradients."""
    (found, width), *_ = run_on(plan.devices, counted, plan, images)
    layers = {s.name: s for s in payload.sizes(LeNet5(classes=12), (1, 32, 32))}
    split = sum(layer.bytes // width for layer in found if layer.name in LINEAR)
    rings = sum(payload.gradient_values(layers[layer.name], plan.devices) for layer in found if layer.name in LINEAR)
    return split, rings


def test_splitting_pays_up_to_as_many_images_as_the_formula_says() -> None:
    layers = [s for s in payload.sizes(LeNet5(classes=12), (1, 32, 32)) if s.name in LINEAR]
    ranks = 4
    turn = sum(s.parameters for s in layers) / sum(s.inputs + s.outputs / ranks for s in layers)
    below, above = 4 * int(turn // 4), 4 * int(turn // 4 + 1)
    results: list[Any] = [total(Plan(channel=ranks), images) for images in (below, above)]
    assert [split < rings for split, rings in results] == [True, False]
