"""Results of streamed models in calls and evaluations: numbers, vectors, dataclasses, and a batch of one without its
dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import mural
from mural.engine.opened_results import opened
from mural.shard import ShardedTensor
from streamed_law import check_steps, images


@dataclass(frozen=True)
class Scores:
    """What some models return."""

    logits: Any
    more: Any = None


class Pair(NamedTuple):
    """Two results."""

    one: Tensor
    two: Tensor


class Returning(nn.Module):
    """A convolution, and what is made of its result."""

    def __init__(self, code: str):
        super().__init__()
        self.conv, self.code = nn.Conv2d(2, 3, 3, padding=1), code

    def forward(self, x: Tensor) -> Any:
        return eval(self.code, {"F": F, "Scores": Scores, "Pair": Pair, "y": self.conv(x), "w": self.conv.weight})


def plain(result: Any) -> list[Any]:
    """The values in a result, whole."""
    leaves = pytree.tree_leaves(opened(result))
    return [leaf.full() if isinstance(leaf, ShardedTensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "code",
    [
        "y.mean() * 2", "y.mean((0, 2, 3))", "(y, y.mean(), 3, 'name', None)", "Pair(y, y.sum())", "(y, w * 2)",
        "Scores(y, y.mean((2, 3)))", "Scores(y)", "[Scores((y, Scores(y.mean())), {'low': F.avg_pool2d(y, 4)}), y]",
        "{'y': y, 'rest': [y.mean((2, 3)), F.avg_pool2d(y, 4).flip(2).mean()]}", "y.movedim(1, -1).reshape(-1, 3)",
    ],
)  # fmt: skip
def test_results(code: str, count: int) -> None:
    """A number that the loss read too was forgotten, and a dataclass was no result of the image."""

    def loss(output: Any, target: Tensor) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves(opened(output)) if isinstance(leaf, Tensor)]
        return torch.stack([t.square().mean() for t in tensors]).sum() * target.mean()

    torch.manual_seed(1)
    model, x, target = Returning(code).double(), images(count, (20, 23), 1)[0], torch.rand(count).double()
    pm = mural.parallelize(model, mural.Plan(stream=(8, 9)), loss=loss)
    expected = model(x)
    output, _, value = pm.eval().evaluate(x, target)
    for found in (output, pm(x)):
        assert type(found) is type(expected) or isinstance(found, Tensor)
        for got, want in zip(plain(found), plain(expected), strict=True):
            if isinstance(want, Tensor):
                torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-12)
            else:
                assert got == want
    torch.testing.assert_close(value, loss(expected, target).detach(), rtol=1e-10, atol=1e-12)


class Hidden:
    """Nobody sees the tensors in it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def test_results_that_cannot_be_seen() -> None:
    """They are named."""

    class Hiding(nn.Conv2d):
        def forward(self, input: Tensor) -> Any:
            return Hidden(super().forward(input))

    pm = mural.parallelize(Hiding(2, 3, 3), mural.Plan(stream=(8, 8)), loss=F.cross_entropy)
    with pytest.raises(mural.PlanError, match="returns a Hidden, whose tensors cannot be seen"):
        pm(torch.zeros(1, 2, 20, 20))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: y[0].square().mean() + F.mse_loss(y.squeeze(0), t[0]),
        lambda y, t: sum(F.smooth_l1_loss(a, b) for a, b in zip(y, t, strict=True)),
        lambda y, t: ((y.squeeze(0).flatten(1) - t.flatten(2)[0]) ** 2).mean(1).sum() + y.std(),
    ],
)
def test_a_batch_of_one_without_its_dim(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Nothing of the image was needed for it, and it was refused."""
    torch.manual_seed(1)
    batches = [(x, torch.rand(1, 3, 20, 23, dtype=torch.float64)) for x in images(1, (20, 23))]
    check_steps(nn.Conv2d(2, 3, 3, padding=1).double(), loss, batches, mural.Plan(stream=(8, 9)))


def test_a_number_taken_out_of_a_batch_of_one() -> None:
    """It had no tile to come from."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y.squeeze(0).mean((1, 2)), target[0])

    pm = mural.parallelize(nn.Conv2d(2, 3, 3).double(), mural.Plan(stream=(8, 8)), loss=loss)
    with pytest.raises(mural.UnsupportedOp, match="keep the dim of the batch"):
        pm.step(images(1, (20, 20), 1)[0], torch.rand(1, 3).double())
