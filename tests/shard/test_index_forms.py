"""Every form of index that torch takes, read and written: exact under the law, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mural
from law import Expr, Grid, holds, image, raises, some

GRIDS = [Grid((2, 2)), Grid((1, 2), data=2), Grid((2, 1), cuts=((3, 10),)), Grid((3, 1), cuts=((0, 9, 4),))]

READS = """
x[[slice(None), slice(1, 3)]]
x[[slice(None), slice(None), slice(1, 9), slice(None, None, 2)]]
x[[slice(None), slice(None), slice(4, 5)]]
x[[0, slice(None)]]
x[[None, 0]]
x[[..., 0]]
x[[slice(None), [0, 3]]]
x[[[0, 1], [1, 3]]]
x[[0, 1]]
x[[]]
x[[[]]]
x[:, True]
x[False].sum() + x
x[None, torch.tensor(True), ..., 2]
x[np.array([1, 0, 1])]
x[:, :, np.int64(4)]
x[:, np.array([[0, 1, 2], [3, 3, 0]])]
x[:, torch.tensor([[0, 1], [2, 3]])]
x[:, :, torch.tensor([[0, 11], [2, 12]])]
x[:, [0, 2], :, [1, 2]]
x[:, :, [0, 12, 5], [1, 2, 10]]
x[1, [0, 2], 3:]
x[[1, 0], ..., [10, 4]]
x.unflatten(1, (2, 2))[:, [0, 1], [1, 0]]
x[0, 0, 0, 0, None] * x
x[0, 0, 5, 0, None, True] * x
x[torch.tensor([[0], [1]]), torch.tensor([1, 2, 3])]
x[:, torch.tensor([True, False, True, True])]
x[:, :, torch.arange(13) % 3 == 1]
x[:, :, (image(13, 11) > 0)]
x[image(2, 4) > -1]
x[..., range(0, 11, 2)]
x[:, (0, 2)]
x[..., :torch.tensor(5), None]
x[:, x.mean((0, 2, 3)).argsort()]
x[:, :, 1:12][[slice(None), slice(None), slice(0, 4)]]
x.flatten(2)[[slice(None), slice(1, 3)]]
x.flatten(2)[:, True]
x.flatten(2)[:, [1, 0]]
x.flatten(2)[[slice(None), slice(None), slice(1, 9)]]
image(5, 3)[(x[:, 0] > 0).long() + 2] * x.mean()
image(5)[(x > 0).long()] + x
""".strip().splitlines()

WRITES: list[tuple[Any, float | None]] = [
    ([slice(None), slice(1, 3)], 1.5),
    ([slice(None), slice(None), slice(2, 9)], None),
    ([..., slice(2, 9)], None),
    ((slice(None), [0, 2]), 0.5),
    ((slice(None), [0, 2], slice(1, 12)), None),
    ((..., [1, 3], slice(None), slice(None)), 0.5),
    ((slice(None), np.array([1, 3])), 2.0),
    ((slice(None), torch.tensor([True, False, True, False])), 2.0),
    ((slice(None), np.int64(1), slice(3, 12)), None),
    ([None, slice(None), slice(1, 2)], 3.0),
    ((slice(None), slice(0, 0)), 3.0),
]


@pytest.mark.parametrize("grid", some(GRIDS, 1, 2), ids=str)
@pytest.mark.parametrize("code", READS)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_reading_by_any_index(code: str, grid: Grid) -> None:
    holds(Expr(code), image(2, 4, 13, 11), grid)


class Writes(nn.Module):
    """Writes a number, or another tensor's part, to a copy of its input."""

    def __init__(self, index: Any, value: float | None):
        super().__init__()
        self.index, self.value = index, value

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        z[self.index] = y[self.index] if self.value is None else self.value
        return z * y


@pytest.mark.parametrize("grid", some(GRIDS, 1, 2), ids=str)
@pytest.mark.parametrize(("index", "value"), WRITES, ids=str)
def test_writing_by_any_index(index: Any, value: float | None, grid: Grid) -> None:
    holds(Writes(index, value), [image(2, 4, 13, 11), image(2, 4, 13, 11, seed=1)], grid)


def at(index: Callable[[Tensor], Any]) -> None:
    x = Grid((2, 1)).shard(image(2, 4, 13, 11))
    x[index(x)]


def positive(x: Tensor) -> Tensor:
    return x > 0


def integers(x: Tensor) -> Tensor:
    return (x[:, 0, :, 0] > 0).long()


def pair_of_integers(x: Tensor) -> Any:
    return slice(None), integers(x)


def a_float(x: Tensor) -> Any:
    return slice(None), 1.5


def too_many(x: Tensor) -> Any:
    return [slice(None)] * 5


def test_a_mask_is_called_a_mask_and_positions_are_not() -> None:
    raises("a mask", mural.UnsupportedOp, at, positive)
    for index in (integers, pair_of_integers):
        raises("positions", mural.UnsupportedOp, at, index)
        with pytest.raises(AssertionError):
            raises("mask", mural.UnsupportedOp, at, index)


def test_what_is_no_index_is_refused_as_torch_refuses_it() -> None:
    raises("only integers, slices", IndexError, at, a_float)
    raises("too many indices", IndexError, at, too_many)


def beyond(write: bool) -> None:
    """A position out of range, where rank 0 holds nothing that torch would look at."""
    x = Grid((2, 1), cuts=((0, 13),)).shard(image(2, 4, 13, 11))
    if write:
        x[:, [1, 4]] = 0.0
    else:
        x.index_select(1, torch.tensor([4]))


def test_a_position_out_of_range_is_refused_on_ranks_without_data_too() -> None:
    for write in (False, True):
        raises("out of ", IndexError, beyond, write)
