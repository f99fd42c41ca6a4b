"""A custom autograd Function is one node of the graph: its gradients, costs, replay and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import mural
from mural.graph.facts import costs

IMAGE = (1, 3, 16, 16)
TABLE = torch.tensor([2.0])  # has memory, and is no attribute of the model


class Splits(Function):
    """Two results, of which one is not differentiable, and calls inside that nobody should see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, power: int = 2) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        signs = Inner.apply(x.sign() * TABLE)
        ctx.mark_non_differentiable(signs)
        return (x * weight).tanh() ** power, signs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], grads[0].sum((0, 2, 3), keepdim=True), None


class Inner(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class linear(Function):
    """A Function with the name of an operation that has a formula."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Asks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * float(x.max())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class Net(nn.Module):
    """A custom Function with a parameter between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, signs = Splits.apply(self.first(x), self.weight, 3)
        return self.last(linear.apply(y) + signs)


def test_a_function_is_one_node() -> None:
    graph = mural.capture(Net(), IMAGE)
    assert [node.op for node in graph] == ["conv2d", "Splits", "linear", "add", "conv2d"]
    node = graph["Splits:1"]
    assert (node.kind, node.inputs, node.gradients) == ("function", (0, "weight"), (True, False))
    assert node.output_shapes == ((1, 4, 16, 16),) * 2
    assert [saved.owner for saved in node.saved] == [0]
    assert graph["linear:1"].gradients == graph["add:1"].gradients == (True,)
    assert graph.unsupported() == ()


def test_its_work_is_not_known_and_counts_nothing() -> None:
    graph = mural.capture(Net(), IMAGE)
    for site in ("Splits:1", "linear:1"):
        assert costs(graph[site], ("input",) * len(graph[site].inputs)).result.work == 0


def test_pages_and_plans_with_a_function(tmp_path: Path) -> None:
    graph = mural.capture(Net(), IMAGE)
    for name in ("graph.html", "graph.dot"):
        graph.draw(tmp_path / name)
        assert "Splits" in (tmp_path / name).read_text()
    assert "Splits" in str(graph)


def test_values_inside_a_function_raise() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Asks.apply(x)

    with pytest.raises(mural.UnsupportedOp, match="needs the values of a tensor"):
        mural.capture(Model(), IMAGE)
