"""Sums of gradients over several sets of ranks: what they are, when they leave, and in which order on every rank."""

from __future__ import annotations

from collections import Counter
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from law import Grid
from mural.comm.groups import new_group
from mural.gradients.bucket_sums import Sum
from mural.gradients.reducer import GradientSums, Reducer
from mural.gradients.replicated import Replicated
from mural.models import LeNet5
from ranks import DEVICE, run_on

Launch = tuple[tuple[int, ...], int]
"""A collective: the ranks of its group, and the how manyth of theirs."""


class Launches:
    """Notes the collectives that this rank begins for gradients."""

    def __init__(self) -> None:
        self.noted: list[Launch] = []
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.original = Sum.launch

    def __enter__(self) -> Launches:
        def launch(total: Sum, buffer: Tensor) -> Any:
            ranks = tuple(dist.get_process_group_ranks(total.group))
            self.noted.append((ranks, self.counts[ranks]))
            self.counts[ranks] += 1
            return self.original(total, buffer)

        Sum.launch = launch  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Sum.launch = self.original  # type: ignore[method-assign]


def small_buckets(pm: Any) -> None:
    pm.reducer.bucket_bytes = 400
    for held in pm.reducer.sets:
        held.state = None


class Tied(nn.Module):
    """Layers of which the first and the last have one weight, and those around a cut another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(8))
        self.layers[7].weight = self.layers[0].weight
        self.layers[5].weight = self.layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def batch(images: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(images, 3, 8, 8, dtype=torch.float64, generator=generator)
    return image.to(DEVICE), torch.randint(3, (images, 8, 8), generator=generator).to(DEVICE)


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double().to(DEVICE)


def begun(options: dict[str, Any]) -> list[Launch]:
    """What this rank began in three steps, the first of which learns."""
    pm = mural.parallelize(tied(), mural.Plan(**options), loss=F.cross_entropy)
    small_buckets(pm)
    with Launches() as launches:
        for _ in range(3):
            pm.step(*batch())
    return launches.noted


STAGES = [
    {"stage": 2, "data": 2, "microbatches": 2, "schedule": "1f1b", "cuts": ("layers.4",)},
    {"stage": 3, "grids": ((2, 1), (1, 1), (1, 1)), "cuts": ("layers.3", "layers.6"), "schedule": "sequential"},
    {"stage": 4, "schedule": "gems", "microbatches": 4, "cuts": ("layers.3", "layers.4", "layers.6")},
]


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_all_ranks_begin_collectives_in_one_order(options: dict[str, Any]) -> None:
    """Two groups that two ranks use in different orders may wait for ever over NCCL; so may a circle of three."""
    orders = run_on(mural.Plan(**options).devices, begun, options)
    assert max(len({ranks for ranks, _ in order}) for order in orders) > 1, "no rank has two groups: nothing is tried"
    after: dict[Launch, set[Launch]] = {}
    for order in orders:
        for first, second in pairwise(order):
            after.setdefault(second, set()).add(first)
    assert list(TopologicalSorter(after).static_order())  # raises where there is a circle
    for rank, order in enumerate(orders):
        for ranks in {ranks for ranks, _ in order}:
            every = [[number for r, number in orders[other] if r == ranks] for other in ranks]
            assert rank in ranks
            assert all(numbers == every[0] for numbers in every)


def left_early() -> tuple[list[int], int, int]:
    """How many backwards were done when each bucket left, in the second step; backwards of this rank, and buckets."""
    options = {"stage": 2, "data": 2, "microbatches": 3, "schedule": "1f1b", "cuts": ("layers.4",)}
    pm: Any = mural.parallelize(tied(), mural.Plan(**options), loss=F.cross_entropy)
    small_buckets(pm)
    pm.step(*batch(6))
    found: list[int] = []
    original = Sum.launch

    def launch(total: Sum, buffer: Tensor) -> Any:
        found.append(sum("backward" in str(action) for action, _, _ in pm.way.spans))
        return original(total, buffer)

    Sum.launch = launch  # type: ignore[method-assign]
    try:
        pm.step(*batch(6))
    finally:
        Sum.launch = original  # type: ignore[method-assign]
    done = sum("backward" in name for name, _, _ in pm.actions())
    return found, done, sum(len(held.buckets) for held in pm.reducer.sets)


def test_buckets_of_stages_leave_in_the_last_backward() -> None:
    for found, backwards, buckets in run_on(4, left_early):
        assert backwards == 3
        assert len(found) == buckets
        assert set(found) == {2, 3}  # none before the last backward, some within it, the last ones after it
        assert found.count(2) >= 3


def summed(clipped: bool) -> list[float]:
    """A sum over two stages, of ranks 0 and 1, and of rank 2: of backwards one by one, with sums between them."""
    mesh = Grid((), 3).mesh()
    w = nn.Parameter(torch.zeros(2, dtype=torch.float64, device=DEVICE))
    group = new_group(range(3), 60.0)
    sums = GradientSums([Replicated([("w", w)], group, 1.0 if mesh.rank == 2 else 0.5)], mesh)
    found: list[float] = []
    for reduce in (True, False, True, True):
        sums.reopen()
        (w * (mesh.rank + 1)).sum().backward() if not reduce else None
        if reduce:
            with sums.watching():
                (w * (mesh.rank + 1)).sum().backward()
            assert w.grad is not None
            if clipped:
                w.grad.mul_(0.5)
            found.append(float(w.grad[0]))
    return found


def test_what_was_added_up_counts_once_in_the_next_sum() -> None:
    # Each backward: the mean of 1 and 2 on the first stage, and 3 on the second.
    assert run_on(3, summed, False) == [[4.5, 13.5, 18.0]] * 3
    assert run_on(3, summed, True) == [[2.25, 5.625, 5.0625]] * 3


def several() -> tuple[list[int], list[float]]:
    mesh = Grid((), 2).mesh()
    weights = [nn.Parameter(torch.zeros(2, device=DEVICE)) for _ in range(4)]
    reducer = Reducer(weights, mesh, bucket_bytes=1)
    with Launches() as launches:
        counts: list[int] = []
        now = [0]
        with reducer.watching(lambda name: now[0] == 2):
            for now[0] in range(3):
                sum((w * (mesh.rank + 1)).sum() for w in weights).backward()  # type: ignore[union-attr]
                counts.append(len(launches.noted))
    return [*counts, len(launches.noted)], [float(w.grad[0]) for w in weights if w.grad is not None]


def test_a_gradient_leaves_with_what_the_last_backward_added() -> None:
    assert run_on(2, several) == [([0, 0, 3, 4], [4.5] * 4)] * 2


def types() -> tuple[complex, str, float]:
    mesh = Grid((), 2).mesh()
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex128, device=DEVICE))
    wide = nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device=DEVICE))
    wide.grad_dtype = torch.float32
    with Reducer([wave, wide], mesh).watching():
        (wave * (1 + 2j * mesh.rank)).sum().real.backward()
        wide.grad = torch.full_like(wide, 1 + mesh.rank * 2**-12, dtype=torch.float32)
    assert wave.grad is not None
    assert wide.grad is not None
    return complex(wave.grad[0]), str(wide.grad.dtype), float(wide.grad[0])


def test_gradients_keep_their_types() -> None:
    assert run_on(2, types) == [(1 - 1j, "torch.float32", 1 + 2**-13)] * 2


def in_place() -> tuple[bool, float, float]:
    mesh = Grid((), 2).mesh()
    w = nn.Parameter(torch.ones(2, device=DEVICE))
    (w.square() * (mesh.rank + 1)).sum().backward(create_graph=True)
    grad = w.grad
    assert grad is not None
    mural.reduce_gradients([w], mesh)
    once = float(grad[0])
    mural.reduce_gradients([w], mesh)
    return w.grad is grad, once, float(grad[0])


@pytest.mark.filterwarnings("ignore:Using backward")
def test_reduce_gradients_writes_where_the_gradients_are() -> None:
    assert run_on(2, in_place) == [(True, 3.0, 3.0)] * 2


def kept() -> tuple[float, float]:
    """The gradients of a step that was not reduced, before and after one that fails alike on all ranks."""
    pm: Any = mural.parallelize(tied(), mural.Plan(stage=2, microbatches=2, cuts=("layers.4",)), loss=F.cross_entropy)
    pm.step(*batch(), reduce=False)
    before = [p.grad.clone() for p in pm.parameters()]
    with pytest.raises(RuntimeError, match="channel dimensions"):
        pm.step(batch()[0].repeat(1, 2, 1, 1), batch()[1])
    after = [p.grad.clone() for p in pm.parameters()]
    pm.step(*batch(), reduce=True)
    plain = tied()
    for _ in range(2):
        F.cross_entropy(plain(batch()[0]), batch()[1]).backward()
    theirs = dict(plain.named_parameters())
    gap = max(float((p.grad - theirs[name].grad).abs().max()) for name, p in pm.named_parameters())
    return max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)), gap


def test_a_step_that_fails_on_all_ranks_keeps_what_was_accumulated() -> None:
    for changed, gap in run_on(2, kept):
        assert changed == 0.0
        assert gap < 1e-10


def channels() -> list[Launch]:
    pm = mural.parallelize(LeNet5(), mural.Plan(channel=2, data=2), loss=F.cross_entropy)
    small_buckets(pm)
    with Launches() as launches:
        for _ in range(2):
            pm.step(torch.randn(4, 1, 32, 32), torch.arange(4))
    return launches.noted


def test_shares_and_whole_parameters_have_one_order() -> None:
    orders = run_on(4, channels)
    assert [{ranks for ranks, _ in order} for order in orders] == [{(0, 1, 2, 3), (r % 2, r % 2 + 2)} for r in range(4)]
    alike = [[(len(ranks), number) for ranks, number in order] for order in orders]
    assert all(order == alike[0] for order in alike)
