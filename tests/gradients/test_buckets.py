"""Gradients averaged in buckets while backward runs: equal to one device's, and to `reduce_gradients`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural
from law import Grid, difference, image
from mural.gradients import Reducer, is_reduced
from mural.gradients.buckets import arrange
from mural.gradients.replicas import named_axes, ranks_along
from mural.models import UNet
from ranks import restart, run_on

GRIDS = [Grid(), Grid((), 2), Grid((2, 1)), Grid((2, 1), 2), Grid((), 4), Grid((2, 2))]


class Net(nn.Module):
    """A small classifier with everything that gradients can do: tied, unused, frozen and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.tied = nn.Conv2d(6, 6, 3, padding=1)
        self.tied.weight = self.twice.weight
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.tied(F.relu(self.twice(F.relu(self.twice(x)))))
        return self.head(self.frozen(x).mean((2, 3)))


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batch(images: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    labels = torch.randint(5, (images,), generator=torch.Generator().manual_seed(seed))
    return image(images, 3, 12, 10, seed=seed), labels


def loss_on(model: nn.Module, data: tuple[Tensor, ...], grid: Grid | None) -> Tensor:
    x, labels = data if grid is None else (grid.shard(data[0]), grid.shard(data[1], dims=(), cuts=None, align=1))
    return F.cross_entropy(model(x), labels)


def gaps(plain: nn.Module, model: nn.Module) -> dict[str, float]:
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    return {name: difference(q.grad, p.grad) for (name, p), q in pairs}


def steps(grid: Grid, images: tuple[int, ...], bucket_bytes: int, to_none: bool) -> dict[str, float]:
    """The largest differences from plain training on the whole batch, over several steps of an optimizer."""
    plain, model = model_of(Net).to(grid.device), model_of(Net).to(grid.device)
    reducer = Reducer(model.parameters(), grid.mesh(), bucket_bytes=bucket_bytes)
    worst: dict[str, float] = {}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for number, count in enumerate(images):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        data = tuple(part.to(grid.device) for part in batch(count, number))
        loss_on(plain, data, None).backward()
        loss = loss_on(model, data, grid)
        with reducer.watching():
            loss.backward()
        worst = {name: max(gap, worst.get(name, 0.0)) for name, gap in gaps(plain, model).items()}
        if model.unused.weight.grad is not None or model.frozen.weight.grad is not None:
            return {"a gradient where none is": math.inf}
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        mural.reduce_gradients(model, grid.mesh())
        if not all(map(torch.equal, before, [p.grad for p in model.parameters() if p.grad is not None])):
            return {"reduce_gradients changed something": math.inf}
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    return worst | {name: difference(q, p) for (name, p), q in pairs}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_training_equals_one_device(grid: Grid, to_none: bool) -> None:
    # Uneven batches, and fewer images than ranks.
    for found in run_on(grid.world, steps, grid, (4, 5, 3, 1), 1000, to_none):
        assert max(found.values()) <= 1e-10, found


def test_buckets_of_the_usual_size() -> None:
    for found in run_on(2, steps, Grid((), 2), (4, 3), 25 * 2**20, True):
        assert max(found.values()) <= 1e-10, found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("grid", [Grid((), 2, device="cuda"), Grid((2, 1), 2, device="cuda")], ids=str)
def test_training_on_a_shared_gpu_equals_one_device(grid: Grid) -> None:
    try:
        for found in run_on(grid.world, steps, grid, (4, 5, 3, 1), 1000, True):
            assert max(found.values()) <= 1e-10, found
    finally:
        restart(grid.world)  # idle ranks keep their memory of the GPU


def accumulated(order: str) -> dict[str, float]:
    """`o` is a backward outside of the block, `i` one inside, `r` reduce_gradients."""
    grid = Grid((2, 1), 2)
    plain, model = model_of(Net), model_of(Net)
    reducer = Reducer(model, grid.mesh(), bucket_bytes=2000)
    for number, what in enumerate(order):
        if what == "r":
            mural.reduce_gradients(model, grid.mesh())
            continue
        loss_on(plain, batch(3, number), None).backward()
        loss = loss_on(model, batch(3, number), grid)
        if what == "i":
            with reducer.watching():
                loss.backward()
        else:
            loss.backward()
    return gaps(plain, model)


@pytest.mark.parametrize("order", ["ooi", "iioi", "iorioi"])
def test_accumulation(order: str) -> None:
    for found in run_on(4, accumulated, order):
        assert max(found.values()) <= 1e-10, found


def some_reached() -> list[Any]:
    """Rank 0 reaches `a`, rank 1 `b`, both `c`, nobody `d`; `e` was averaged before, and nobody adds to it now."""
    mesh = Grid((), 2).mesh()
    a, b, c, d, e = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(5))
    reducer = Reducer([a, b, c, d, e], mesh, bucket_bytes=20)
    with reducer.watching():
        ((mesh.rank + 1) * e).sum().backward()
    kept = e.grad
    for _ in range(2):
        for p in (a, b, c):
            p.grad = None
        with reducer.watching():
            (10 * (a if mesh.rank == 0 else b) + (mesh.rank + 1) * c).sum().backward()
    numbers = [None if p.grad is None else p.grad.tolist() for p in (a, b, c, d, e)]
    return [numbers, is_reduced(e.grad), torch.equal(kept, e.grad)]


def test_parameters_that_some_ranks_reach() -> None:
    for numbers, reduced, same in run_on(2, some_reached):
        assert numbers == [[5.0] * 3, [5.0] * 3, [1.5] * 3, None, [1.5] * 3]
        assert reduced
        assert same


class Regions(nn.Module):
    """One convolution in several checkpointed regions."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = checkpoint(self.conv, x, use_reentrant=self.reentrant).sin()
        return x


def regions(reentrant: bool) -> tuple[list[float], int]:
    """Each rank its own image, as in DDP; reentrant checkpoints add to the convolution's gradient three times."""
    mesh = Grid((), 2).mesh()
    torch.manual_seed(0)
    plain = Regions(reentrant).double()
    model = deepcopy(plain)
    reducer = Reducer(model.parameters(), mesh, bucket_bytes=200)
    found: list[float] = []
    for number in range(3):
        x = image(2, 3, 6, 6, seed=number)
        (plain(x).square().sum() / 2).backward()
        loss = model(x[mesh.rank : mesh.rank + 1]).square().sum()
        with reducer.watching():
            loss.backward()
        found += gaps(plain, model).values()
    return found, max(reducer.sets[0].expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    for found, times in run_on(2, regions, reentrant):
        assert max(found) <= 1e-10
        assert times == (3 if reentrant else 1)


def checkpointed_unet() -> dict[str, float]:
    grid = Grid((2, 1), 2)
    torch.manual_seed(0)
    plain = UNet(width=4, depth=2).double()
    model = deepcopy(plain)
    reducer = Reducer(model.parameters(), grid.mesh(), bucket_bytes=3000)
    x = image(2, 3, 16, 16)
    for _ in range(2):
        plain(x).square().mean().backward()
        loss = checkpoint(model, grid.shard(x), use_reentrant=False).square().mean()
        with reducer.watching():
            loss.backward()
    return gaps(plain, model)


def test_halos_of_a_recomputed_model_beside_buckets() -> None:
    for found in run_on(4, checkpointed_unet):
        assert max(found.values()) <= 1e-10, found


def frozen_later() -> list[dict[str, float]]:
    grid = Grid((), 2)
    plain, model = model_of(Net), model_of(Net)
    reducer = Reducer(model.parameters(), grid.mesh(), bucket_bytes=500)
    found: list[dict[str, float]] = []
    for number, frozen in enumerate((False, True, True, False)):
        for m in (plain, model):
            m.zero_grad()
            m.stem.requires_grad_(not frozen)
            m.frozen.requires_grad_(frozen)
        loss_on(plain, batch(3, number), None).backward()
        with reducer.watching():
            loss_on(model, batch(3, number), grid).backward()
        found.append(gaps(plain, model))
    return found


def test_freezing_between_blocks() -> None:
    for found in run_on(2, frozen_later):
        assert all(max(f.values()) <= 1e-10 for f in found), found


def mixed() -> tuple[dict[str, float], int]:
    mesh = Grid((), 2).mesh()
    torch.manual_seed(0)
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    layers = [nn.Linear(5, 5).to(kinds[i % 4]) for i in range(8)]
    model = nn.Sequential(*layers)
    reducer = Reducer(model, mesh)
    x = image(2, 5)
    for _ in range(2):
        model.zero_grad()
        y = x[mesh.rank : mesh.rank + 1]
        for layer in layers:
            y = layer(y.to(layer.weight.dtype)).double()
        with reducer.watching():
            y.square().sum().backward()
    mine = {n: p.grad for n, p in model.named_parameters()}
    plain = deepcopy(model)
    plain.zero_grad()
    for row in range(2):
        y = x[row : row + 1]
        for layer in plain:
            y = layer(y.to(layer.weight.dtype)).double()
        (y.square().sum() / 2).backward()
    tolerance = {torch.float64: 1e-2, torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 1e-2}
    return {n: difference(mine[n], p.grad) / tolerance[p.dtype] for n, p in plain.named_parameters()}, len(
        reducer.sets[0].buckets
    )


def test_types_have_buckets_of_their_own() -> None:
    for found, count in run_on(2, mixed):
        assert count == 4
        assert max(found.values()) <= 1, found


def channels_last() -> tuple[dict[str, float], bool]:
    grid = Grid((), 2)
    plain, model = model_of(Net), model_of(Net).to(memory_format=torch.channels_last)
    reducer = Reducer(model.parameters(), grid.mesh())
    for number in range(2):
        loss_on(plain, batch(4, number), None).backward()
        loss = loss_on(model, batch(4, number), grid)
        with reducer.watching():
            loss.backward()
    return gaps(plain, model), model.twice.weight.grad.stride() == model.twice.weight.stride()


def test_gradients_have_the_memory_order_of_parameters() -> None:
    for found, same in run_on(2, channels_last):
        assert max(found.values()) <= 1e-10, found
        assert same


def kept_gradients() -> tuple[bool, bool]:
    """A gradient that the user keeps does not change in the next step; one that nobody keeps lends its memory."""
    mesh = Grid((), 2).mesh()
    w = nn.Parameter(torch.ones(100))
    reducer = Reducer([w], mesh)
    addresses: list[int] = []
    for number in range(4):
        w.grad = None
        with reducer.watching():
            (w * (number + mesh.rank)).sum().backward()
        addresses.append(w.grad.data_ptr())
    part = w.grad[3:5]
    w.grad = None
    with reducer.watching():
        (w * 7).sum().backward()
    return addresses[2] == addresses[3], part.tolist() == [3.5, 3.5] and w.grad[3] == 7


def test_kept_gradients_stay_and_buffers_are_used_again() -> None:
    assert run_on(2, kept_gradients) == [(True, True)] * 2


def overlap() -> tuple[bool, int]:
    """Whether the first bucket was sent before backward ended, and how many were."""
    mesh = Grid((), 2).mesh()
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    reducer = Reducer(model.parameters(), mesh, bucket_bytes=300_000)
    with reducer.watching():
        model(torch.randn(4, 256)).sum().backward()
    with mesh.transport.record() as record:
        with reducer.watching():
            model(torch.randn(4, 256)).sum().backward()
            ended = time.perf_counter()
        deadline = time.perf_counter() + 5
        while len(record.spans("bucket")) < len(reducer.sets[0].buckets) and time.perf_counter() < deadline:
            time.sleep(0.01)
    spans = record.spans("bucket")
    return min(start for start, _ in spans) < ended, sum(start < ended for start, _ in spans)


def test_buckets_leave_while_backward_runs() -> None:
    for early, count in run_on(2, overlap):
        assert early
        assert count == 5  # of six: the last one waits for the end of the block


SIZES = st.lists(st.tuples(st.integers(1, 400), st.sampled_from("fh")), max_size=30)


@given(SIZES, st.integers(1, 1000), st.randoms(use_true_random=False))
def test_every_parameter_has_one_place(sizes: list[tuple[int, str]], limit: int, random: Any) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    found = arrange(sizes, order, limit)
    assert sorted(i for members in found for i in members) == sorted(order)
    position = {index: at for at, index in enumerate(order)}
    lasts = [position[members[-1]] for members in found]
    assert lasts == sorted(lasts)
    for members in found:
        assert len({sizes[i][1] for i in members}) == 1
        assert len(members) == 1 or sum(sizes[i][0] for i in members) <= limit
        assert [position[i] for i in members] == sorted(position[i] for i in members)


def drawn(sizes: list[int], limit: int, used: list[bool]) -> list[Any]:
    mesh = Grid((), 2).mesh()
    weights = [torch.ones(n, dtype=torch.float64, requires_grad=True) for n in sizes]
    reducer = Reducer(weights, mesh, bucket_bytes=limit)
    for number in range(2):
        loss = sum((w.sum() * (i + mesh.rank + number) for i, w in enumerate(weights) if used[i]), torch.zeros(()))
        if loss.requires_grad:
            with reducer.watching():
                loss.backward()
    return [None if w.grad is None else w.grad.tolist() for w in weights]


@settings(max_examples=15)
@given(st.data())
def test_means_for_any_sizes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    used = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    expected = [[2 * i + 2.0] * n if u else None for i, (n, u) in enumerate(zip(sizes, used, strict=True))]
    assert run_on(2, drawn, sizes, data.draw(st.integers(1, 1000)), used) == [expected] * 2


def spatial_alone() -> tuple[list[float], bool]:
    grid = Grid((2, 1), 2)
    mesh = grid.mesh()
    w = torch.zeros(2, requires_grad=True)
    reducer = Reducer([w], mesh, axes=("spatial",))
    with reducer.watching():
        (w * mesh.rank).sum().backward()
    return w.grad.tolist(), is_reduced(w.grad)


def test_the_mean_over_some_axes() -> None:
    found = run_on(4, spatial_alone)
    assert [grad for grad, _ in found] == [[0.5, 0.5], [0.5, 0.5], [2.5, 2.5], [2.5, 2.5]]
    assert not any(everywhere for _, everywhere in found)  # reduce_gradients still has to average these


def along(axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    return ranks_along(Grid((2, 1), 2).mesh(), named_axes(axes))


def test_ranks_along_axes() -> None:
    assert run_on(4, along, ("data",))[1] == [(0, 2), (1, 3)]
    assert run_on(4, along, ("spatial",))[2] == [(0, 1), (2, 3)]
    assert run_on(4, along, ("data", "spatial"))[3] == [(0, 1, 2, 3)]


def refused(what: str) -> str:
    mesh = Grid((), 2).mesh()
    w = nn.Parameter(torch.ones(4, 3))
    try:
        if what == "sparse":
            table = nn.Embedding(4, 3, sparse=True)
            with Reducer(table, mesh).watching():
                table(torch.tensor([1])).sum().backward()
        elif what == "history":
            with Reducer([w], mesh).watching():
                w.square().sum().backward(create_graph=True)
        elif what == "nested":
            reducer = Reducer([w], mesh)
            with reducer.watching(), reducer.watching():
                pass
        elif what == "axes":
            Reducer([w], mesh, axes=("stage",))
        elif what == "different":
            Reducer([w, *([w.clone()] if mesh.rank else [])], mesh)
    except mural.MuralError as error:
        found = f"{type(error).__name__}: {error}"
        with Reducer([w], mesh).watching():  # and the ranks go on
            (w * 2).sum().backward()
        return found if w.grad is not None and w.grad[0, 0] == 2 else "the next block failed"
    return "nothing was raised"


REFUSED = {
    "sparse": "UnsupportedOp: the gradient of weight has the layout torch.sparse_coo",
    "history": "UnsupportedOp: the gradient of parameter 0 of shape (4, 3) has a graph",
    "nested": "LayoutError: watching() on Mesh(data=2",
    "axes": "PlanError: axes=('stage',)",
    "different": "LayoutError: Reducer got different parameters on different ranks",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    for text in run_on(2, refused, what):
        assert text.startswith(REFUSED[what]), text


def raised_alone(where: str) -> str:
    """Rank 1 raises: inside the block, before or after its buckets left, or before the block."""
    grid = Grid((2, 1))
    mesh = grid.mesh()
    model = model_of(Net)
    reducer = Reducer(model, mesh, bucket_bytes=500)
    try:
        loss = loss_on(model, batch(2), grid)
        if where == "before":
            loss = loss_on(model, batch(2), None)  # no messages in backward: rank 0 waits for the mean alone
            x = grid.shard(image(2, 3, 12, 10))
            if mesh.rank == 1:
                torch.linalg.svd(x)
        with reducer.watching():
            if where == "begin" and mesh.rank == 1:
                raise ValueError("of my own")
            loss.backward()
            if where == "end" and mesh.rank == 1:
                raise ValueError("of my own")
    except Exception as error:
        return f"{type(error).__name__} {all(p.grad is None for p in model.parameters())}"
    return "nothing"


@pytest.mark.parametrize("where", [pytest.param("begin", marks=pytest.mark.slow), "end", "before"])
def test_a_rank_that_raises_alone_keeps_nobody_waiting(where: str) -> None:
    begin = time.monotonic()
    raised = "UnsupportedOp" if where == "before" else "ValueError"
    try:
        assert run_on(2, raised_alone, where) == ["PeerError True", f"{raised} True"]
    finally:
        restart(2)  # the alarm has rung
    assert time.monotonic() - begin < 60


def all_raise() -> float:
    grid = Grid((2, 1))
    plain, model = model_of(Net), model_of(Net)
    reducer = Reducer(model, grid.mesh(), bucket_bytes=500)
    loss = loss_on(model, batch(2), grid)
    try:
        with reducer.watching():
            loss.backward()
            raise ValueError("of all")
    except ValueError:
        pass
    loss_on(plain, batch(2), None).backward()
    loss = loss_on(model, batch(2), grid)
    with reducer.watching():
        loss.backward()
    return max(gaps(plain, model).values())


def test_an_error_of_all_ranks_leaves_the_reducer_usable() -> None:
    assert max(run_on(2, all_raise)) <= 1e-10


def compiled() -> list[dict[str, float]]:
    grid = Grid((), 2)
    plain, model = model_of(Net), model_of(Net)
    fast = torch.compile(model)
    reducer = Reducer(model.parameters(), grid.mesh(), bucket_bytes=1000)
    found: list[dict[str, float]] = []
    for number in range(3):
        loss_on(plain, batch(3, number), None).backward()
        loss = loss_on(fast, batch(3, number), grid)  # type: ignore[arg-type]
        with reducer.watching():
            loss.backward()
        found.append(gaps(plain, model))
    # The rank's own images, in a graph of its own: the compiled backward calls the same hooks.
    for m in (plain, model):
        m.zero_grad()
        m.eval()
    x, labels = batch(4)
    F.cross_entropy(plain(x), labels).backward()
    mine = slice(2 * grid.mesh().rank, 2 * grid.mesh().rank + 2)
    with reducer.watching():
        F.cross_entropy(fast(x[mine]), labels[mine]).backward()
    return [*found, gaps(plain, model)]


@pytest.mark.slow
def test_compiled_models() -> None:
    try:
        for found in run_on(2, compiled):
            assert all(max(f.values()) <= 1e-10 for f in found), found
    finally:
        restart(2)  # dynamo stays loaded in the ranks
