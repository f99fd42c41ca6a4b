"""The first call of a block that is computed again: what it writes to is found without a copy of all that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import mural
from law import image
from mural.cost.memory_tally import Tally
from mural.engine.block_inputs import TakenTensors
from mural.errors import PlanError
from mural.shard import ShardedTensor
from mural.shard.halo.fuse import fusing
from ranks import run_on

AGAIN = mural.Plan(recompute="all")


class Writing(nn.Module):
    """A block that does something to its input in place, then computes."""

    def __init__(self, write: Callable[[Tensor], object]):
        super().__init__()
        self.write, self.one, self.other = write, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.other(self.one(x).sigmoid())


class Margins(nn.Module):
    """Runs a layer after two others; from the second run on, a block in its place.

    The first run teaches that a window is read, so what the block takes in its first call has a margin.
    """

    def __init__(self, write: Callable[[Tensor], object]):
        super().__init__()
        self.one, self.two, self.plain = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.block, self.runs = Writing(write), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = self.two(self.one(x))
        return self.plain(y) if self.runs == 1 else self.block(y)


def gradients(make: Callable[[], nn.Module], plan: mural.Plan) -> list[Tensor]:
    """The gradients of some steps."""
    torch.manual_seed(0)
    pm, found = mural.parallelize(make().double(), plan), list[Tensor]()
    for step in range(4):
        pm.zero_grad()
        pm.step(image(2, 4, 24, 22, seed=step), torch.arange(2 * 24 * 22).view(2, 24, 22) % 4)
        found += [p.grad.clone() for p in pm.parameters() if p.grad is not None]
    return found


def halved(x: Tensor) -> None:
    """What torch does not count as a write."""
    x.data.mul_(0.5)


def doubled_half(x: Tensor) -> None:
    """A write to a part."""
    x[:, :2].mul_(2)


def kernel(x: Tensor) -> None:
    """A write of somebody's own kernel, of which torch knows the count alone."""
    assert isinstance(x, ShardedTensor)
    piece = x.local
    piece.detach().numpy()[:] += 1
    torch.autograd.graph.increment_version(piece)


def test_the_first_call_takes_no_more_memory() -> None:
    """What blocks take was copied in their first call, should they write to it: steps that were planned for all of a
    device ended there.
    """
    model, peaks = nn.Sequential(*(Writing(torch.abs) for _ in range(3)), nn.Conv2d(4, 4, 1)), list[int]()
    model[-1].register_forward_pre_hook(lambda *_: peaks.append(tally.peak - before))
    pm, tally = mural.parallelize(model, AGAIN), Tally(lambda size: size)
    for _ in range(2):
        pm.zero_grad()
        with tally:
            tally.forget()
            before = tally.live
            pm.step(torch.ones(2, 4, 64, 64), torch.zeros(2, 64, 64, dtype=torch.long))
    assert peaks[0] <= peaks[1]


@pytest.mark.parametrize("write", [torch.abs, torch.relu_, halved, doubled_half])
def test_what_it_writes_to(write: Callable[[Tensor], object]) -> None:
    """What a block wrote to the `data` of its input, it wrote again."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), Writing(write), nn.Conv2d(4, 4, 1))

    for one, other in zip(gradients(made, AGAIN), gradients(made, mural.Plan()), strict=True):
        assert torch.equal(one, other)


def test_a_write_that_torch_counts_but_does_not_tell_of_is_refused() -> None:
    with pytest.raises(PlanError, match="Writing, a block in recompute, writes to what it takes, by an operation that"):
        gradients(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), Writing(kernel), nn.Conv2d(4, 4, 1)), AGAIN)


def with_margins(write: Callable[[Tensor], object], offload: Any) -> tuple[float, int]:
    """How far gradients are apart from those that keep everything, and how many tensors with margins blocks took."""
    found: list[TakenTensors] = []
    begin = TakenTensors.__init__

    def noted(self: TakenTensors, tensors: list[Tensor]) -> None:
        begin(self, tensors)
        found.append(self)

    with patch.object(TakenTensors, "__init__", noted), fusing(True):
        pairs = [
            gradients(lambda: Margins(write), mural.Plan(spatial=(2, 1), recompute=again, offload=kinds))
            for again, kinds in (("all", offload), ((), ()))
        ]
    apart = max(float((a - b).abs().max()) for a, b in zip(*pairs, strict=True))
    return apart, sum(margin is not None for taken in found for margin in taken.margins)


@pytest.mark.parametrize("offload", [(), ("activations",)])
@pytest.mark.parametrize("write", [torch.abs, torch.relu_, doubled_half])
def test_tensors_with_margins(write: Callable[[Tensor], object], offload: Any) -> None:
    for apart, margins in run_on(2, with_margins, write, offload):
        assert apart < 1e-12
        assert margins or offload
