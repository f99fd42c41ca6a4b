"""What torch is asked about shapes: nobody else sees the question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mural.cost.memory_tally import Tally, exact
from mural.ranks import Mesh
from mural.shard.place import place_on
from mural.shard.shape_probes import order_after, result_for

VIEWS: list[Callable[[Tensor], Any]] = [
    lambda x: x.permute(0, 2, 3, 1),
    lambda x: x.transpose(1, -1).flatten(2),
    lambda x: x.reshape(2, 2, 2, 8, 8),
    lambda x: x.permute(0, 2, 3, 1).reshape(2, 64, 4).transpose(0, 1),
    lambda x: x.view(torch.Size((2, 4, 64))),
    lambda x: x[:, :1].expand(2, 4, 8, 8),
    lambda x: x.chunk(3, dim=1),
    lambda x: torch.atleast_3d(x),
    lambda x: x.reshape_as(x),
]


@pytest.mark.parametrize("view", VIEWS, ids=range(len(VIEWS)))
def test_a_tally_counts_what_the_plain_tensor_takes(view: Callable[[Tensor], Any]) -> None:
    """A rehearsal of a Swin transformer counted each probe as memory of the step: its peaks were 6% too high."""
    plain = torch.empty(2, 4, 8, 8, device="meta")
    peaks: list[int] = []
    for x in (plain, place_on(plain, Mesh.of_one())):
        with Tally(exact) as tally:
            tally.enter(getattr(x, "local", x))
            view(x)
        peaks.append(tally.peak)
    assert peaks[0] == peaks[1]


def test_function_modes_do_not_see_it() -> None:
    seen: list[str] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    other = torch.empty(6)
    with Watching():
        assert result_for(torch.Tensor.reshape_as, (2, 3), other).shape == (6,)
        assert order_after(torch.Tensor.permute, 3, (2, 0, 1)) == [2, 0, 1]
    assert set(seen) <= {"__get__"}, "what it asks of the tensors of the call"
