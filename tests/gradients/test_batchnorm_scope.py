"""Batch norm of each rank's piece by itself, and weights averaged over ranks: equal to the same rule on one device."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mural
from law import Grid, difference, image, loss_of
from mural.gradients import Reducer, average_buffers, average_weights
from mural.ranks import Mesh
from mural.shard import batchnorm_scope
from ranks import run_on


class Functional(nn.Module):
    """`F.batch_norm` with buffers of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.weight, None, training=True, momentum=0.3)


def norm(name: str, dims: int) -> nn.Module:
    torch.manual_seed(0)
    kind: Any = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    made = {
        "usual": lambda: kind(3),
        "cumulative": lambda: kind(3, momentum=None),
        "plain": lambda: kind(3, affine=False),
        "untracked": lambda: kind(3, track_running_stats=False),
        "function": lambda: Functional(3),
    }[name]().double()
    for p in made.parameters():
        nn.init.normal_(p)
    return made


def boxes_of(x: mural.ShardedTensor) -> list[tuple[slice, ...]]:
    """The places of all different pieces."""
    mesh: Mesh = x.mesh
    found = {x.placement.box_at(mesh.coordinates_of(rank)): None for rank in range(mesh.world)}
    return [tuple(slice(i.start, i.stop) for i in box) for box in found]


def by_pieces(model: nn.Module, x: Tensor, boxes: list[tuple[slice, ...]]) -> Tensor:
    """The rule on one device: each piece by itself, buffers moved by the mean over the pieces that have values."""
    pieces = [torch.zeros_like(x)]
    moved: list[dict[str, Tensor]] = []
    for box in boxes:
        if x[box].numel():
            moved.append({name: buffer.clone() for name, buffer in model.named_buffers()})
            piece = torch.func.functional_call(model, moved[-1], x[box])
            pieces.append(torch.zeros_like(x).index_put(indices(box, x), piece.reshape(-1)))
    for name, buffer in model.named_buffers():
        values = torch.stack([state[name] for state in moved])
        buffer.copy_(values.mean(0) if buffer.is_floating_point() else values[0])
    return torch.stack(pieces).sum(0)


def indices(box: tuple[slice, ...], x: Tensor) -> tuple[Tensor, ...]:
    """The positions of a box, one list for each dim."""
    inside = torch.zeros(x.shape, dtype=torch.bool)
    inside[box] = True
    return inside.nonzero(as_tuple=True)


def compare(name: str, grid: Grid, shapes: list[tuple[int, ...]], each: bool) -> dict[str, float]:
    """Differences after a few steps; buffers are averaged after each of them, or once."""
    plain = norm(name, len(shapes[0]) - 2)
    model = deepcopy(plain)
    found: dict[str, float] = {}
    for number, shape in enumerate(shapes):
        x = image(*shape, seed=number) * (1 + number)
        piece = grid.shard(x)
        boxes = boxes_of(piece)
        piece.requires_grad_()
        x.requires_grad_()
        with batchnorm_scope("rank"):
            y = model(piece)
        loss_of(y).backward()
        expected = by_pieces(plain, x, boxes)
        loss_of(expected).backward()
        mural.reduce_gradients(model, grid.mesh())
        if each:
            average_buffers(model, grid.mesh())
        found[f"output {number}"] = difference(y.full(), expected)
        found[f"gradient {number}"] = difference(piece.grad.full(), x.grad)
    average_buffers(model, grid.mesh())
    for (key, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        found[f"gradient of {key}"] = difference(q.grad, p.grad)
    for (key, p), q in zip(plain.named_buffers(), model.buffers(), strict=True):
        found[f"buffer {key}"] = difference(q, p)
    return found


CASES = [
    ("usual", Grid((), 2), [(4, 3, 5, 6), (3, 3, 5, 6), (1, 3, 5, 6)]),
    ("usual", Grid((), 4), [(4, 3, 5, 6), (3, 3, 5, 6), (1, 3, 5, 6)]),
    ("usual", Grid((2, 1), 2), [(2, 3, 6, 5), (1, 3, 7, 5)]),
    ("usual", Grid((2, 2)), [(2, 3, 6, 5)]),
    ("cumulative", Grid((), 4), [(4, 3, 5, 6), (2, 3, 5, 6), (4, 3, 4, 4)]),
    ("plain", Grid((), 2), [(1, 3, 5, 6), (2, 3, 5, 6)]),
    ("untracked", Grid((), 2), [(1, 3, 5, 6), (2, 3, 5, 6)]),
    ("function", Grid((), 2), [(3, 3, 5, 6), (1, 3, 5, 6)]),
    ("usual", Grid((), 2), [(5, 3), (4, 3)]),
    ("usual", Grid((), 2), [(3, 3, 7), (1, 3, 7)]),
    ("usual", Grid((2, 1, 1), 2), [(2, 3, 4, 3, 5), (1, 3, 4, 3, 5)]),
    ("usual", Grid(), [(2, 3, 4, 5)]),
]


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize(("name", "grid", "shapes"), CASES, ids=str)
def test_each_piece_by_itself(name: str, grid: Grid, shapes: list[tuple[int, ...]], each: bool) -> None:
    for found in run_on(grid.world, compare, name, grid, shapes, each):
        wrong = {key: value for key, value in found.items() if not value <= 1e-10}
        assert not wrong, wrong


def against_ddp() -> list[float]:
    """Two steps of DDP, whose batch norms see the rank's images alone, and of mural."""
    grid = Grid((), 2)
    mesh = grid.mesh()
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    other = deepcopy(one)
    ddp = DistributedDataParallel(one, broadcast_buffers=False)
    reducer = Reducer(other, mesh)
    found: list[float] = []
    for number in range(2):
        x, labels = image(4, 3, 6, 6, seed=number), torch.tensor([0, 1, 2, 0])
        mine = slice(2 * mesh.rank, 2 * mesh.rank + 2)
        F.cross_entropy(ddp(x[mine]), labels[mine]).backward()
        with batchnorm_scope("rank"):
            loss = F.cross_entropy(other(grid.shard(x)), grid.shard(labels, dims=(), cuts=None, align=1))
        with reducer.watching():
            loss.backward()
        found += [difference(q.grad, p.grad) for p, q in zip(one.parameters(), other.parameters(), strict=True)]
        found += [difference(q, p) for p, q in zip(one.buffers(), other.buffers(), strict=True)]
    return found


def test_the_step_is_that_of_ddp() -> None:
    assert max(max(found) for found in run_on(2, against_ddp)) <= 1e-10


def quiet() -> tuple[int, int]:
    """Messages of a batch norm in either scope."""
    grid = Grid((), 2)
    model, x = nn.BatchNorm2d(3), grid.shard(torch.rand(4, 3, 5, 5))
    counts: list[int] = []
    for scope in ("rank", "global"):
        with grid.mesh().transport.record() as record, batchnorm_scope(scope):
            model(x)
        counts.append(record.messages)
    return counts[0], counts[1]


def test_nothing_is_sent() -> None:
    for alone, together in run_on(2, quiet):
        assert alone == 0 < together


def recomputed(whole: bool) -> Any:
    grid = Grid((2, 1))
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3)).double()
    other = deepcopy(one)
    x = image(2, 3, 12, 9)
    with batchnorm_scope("rank"):
        one(grid.shard(x)).square().sum().backward()
        loss = checkpoint(other, grid.shard(x), use_reentrant=False).square().sum()
        if whole:
            loss.backward()
    if not whole:
        try:
            loss.backward()
        except Exception as error:
            return type(error).__name__
    return max(difference(q.grad, p.grad) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_recomputed_in_the_same_scope() -> None:
    assert max(run_on(2, recomputed, True)) <= 1e-10


def test_recomputed_in_another_scope_is_refused() -> None:
    assert run_on(2, recomputed, False) == ["CheckpointError"] * 2


def one_value() -> list[str]:
    grid = Grid((), 2)
    found: list[str] = []
    for shape, scope in (((3, 3), "rank"), ((4, 3), "slide")):
        try:
            with batchnorm_scope(scope):
                nn.BatchNorm1d(3)(grid.shard(torch.rand(shape)))
        except ValueError as error:
            found.append(str(error))
    return found


def test_one_value_per_channel_is_refused_on_every_rank() -> None:
    for one, scope in run_on(2, one_value):
        assert "Expected more than 1 value per channel" in one
        assert "rank 1 has one value" in one
        assert "'slide'" in scope


def local_sgd(grid: Grid) -> tuple[list[float], list[float], list[bytes], bool]:
    """Two local steps, then the mean; against the same on one device, with a model for each part of the data axis."""
    mesh = grid.mesh()
    torch.manual_seed(0)
    start = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3), nn.Conv2d(4, 2, 1)).double()
    start.register_buffer("table", torch.tensor([0.1, float("-inf"), 3.3]).double())
    start.register_buffer("count", torch.tensor(3))
    model, parts = deepcopy(start), [deepcopy(start) for _ in range(grid.data)]
    for m in (model, *parts):
        m.eval()  # the law of batch norms over pieces is another test's
    reducer = Reducer(model, mesh, axes=("spatial",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        x = image(2 * grid.data, 3, 8, 8, seed=number)
        optimizer.zero_grad()
        loss = model(grid.shard(x)).square().mean()
        with reducer.watching():
            loss.backward()
        optimizer.step()
        for index, part in enumerate(parts):
            part.zero_grad()
            part(x[2 * index : 2 * index + 2]).square().mean().backward()
            with torch.no_grad():
                for p in part.parameters():
                    p -= 0.1 * p.grad
    model[1].running_mean += mesh.coordinates["data"]
    mine = parts[mesh.coordinates["data"]]
    apart = [difference(q, p) for p, q in zip(mine.parameters(), model.parameters(), strict=True)]
    average_weights(model, mesh)
    means = [torch.stack(ps).mean(0) for ps in zip(*(part.parameters() for part in parts), strict=True)]
    together = [difference(q, p) for p, q in zip(means, model.parameters(), strict=True)]
    together.append(difference(model[1].running_mean, start[1].running_mean + (grid.data - 1) / 2))
    bits = [t.detach().numpy().tobytes() for t in model.state_dict().values()]
    return apart, together, bits, torch.equal(model.table, start.table) and int(model.count) == 3


@pytest.mark.parametrize(
    "grid", [Grid((), 2), Grid((2, 1), 2), pytest.param(Grid((), 3), marks=pytest.mark.slow)], ids=str
)
def test_local_sgd(grid: Grid) -> None:
    found = run_on(grid.world, local_sgd, grid)
    for apart, together, bits, kept in found:
        assert max(apart) <= 1e-10
        assert max(together) <= 1e-10
        assert bits == found[0][2]
        assert kept
