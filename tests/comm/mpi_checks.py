"""What is checked on the ranks of one mpirun: each function runs on all of them, in this order.

    mpirun -n 4 python mpi_checks.py FOLDER fast | slow

Each rank writes into the folder, as JSON, what every check raised, or "". With MPI_CHECKS_DEVICE=cuda the tensors lie
on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from law import Expr, Grid, compare, image
from mural.comm import mpi, mpi_buffers
from mural.errors import PeerError, UnsupportedOp
from mural.models import UNet

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DEVICE = os.environ.get("MPI_CHECKS_DEVICE", "cpu")
SHAPES = ((7,), (3, 5), (), (0,), (2, 0, 3))


def size() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def values(of: int, shape: tuple[int, ...], dtype: torch.dtype, low: int = 1, high: int = 4) -> Tensor:
    """What a rank brings: small whole numbers, whose sums and products every type holds exactly."""
    generator = torch.Generator().manual_seed(of)
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(DEVICE, dtype)


def fractions(of: int, count: int) -> Tensor:
    """Other values of a rank, whose sums are rounded."""
    return torch.rand(count, generator=torch.Generator().manual_seed(of), device="cpu").to(DEVICE)


def everybody(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([values(r, shape, dtype) for r in range(size())])


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), f"{found} is not {expected}"


def all_reduce_sums_in_every_type() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for shape in SHAPES:
            x = values(rank(), shape, dtype)
            dist.all_reduce(x)
            same(x, everybody(shape, torch.float64).sum(0).to(dtype))


def all_reduce_by_every_operation() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        rows = everybody((4, 3), torch.float64)
        for operation, expected in (
            (dist.ReduceOp.PRODUCT, rows.prod(0)),
            (dist.ReduceOp.MAX, rows.amax(0)),
            (dist.ReduceOp.MIN, rows.amin(0)),
            (dist.ReduceOp.AVG, rows.sum(0).div(size(), rounding_mode=None if dtype.is_floating_point else "trunc")),
        ):
            x = values(rank(), (4, 3), dtype)
            dist.all_reduce(x, op=operation)
            same(x, expected.to(dtype))
    bits = torch.stack([values(r, (9,), torch.int64, 0, 255) for r in range(size())])
    for operation, function in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        x = bits[rank()].clone()
        dist.all_reduce(x, op=operation)
        expected = bits[0]
        for row in bits[1:]:
            expected = function(expected, row)
        same(x, expected)


def all_reduce_of_truth_values_and_complex_numbers() -> None:
    rows = torch.stack([values(r, (16,), torch.int64, 0, 2).bool() for r in range(size())])
    for operation, expected in ((dist.ReduceOp.SUM, rows.any(0)), (dist.ReduceOp.PRODUCT, rows.all(0))):
        x = rows[rank()].clone()
        dist.all_reduce(x, op=operation)
        same(x, expected)
    z = torch.complex(values(rank(), (5,), torch.float64), torch.ones(5, dtype=torch.float64))
    dist.all_reduce(z)
    same(z, torch.complex(everybody((5,), torch.float64).sum(0), torch.full((5,), size(), dtype=torch.float64)))
    with pytest.raises(UnsupportedOp, match="bits"):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)


def half_precision_is_added_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        rows = [fractions(r, 100).to(dtype) for r in range(size())]
        x = rows[rank()].clone()
        dist.all_reduce(x)
        exact = torch.stack([row.double() for row in rows]).sum(0)
        assert (x.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.max()


def every_rank_gets_the_same_bits() -> None:
    x = fractions(rank(), 1001)
    dist.all_reduce(x)
    rows = [torch.empty_like(x) for _ in range(size())]
    dist.all_gather(rows, x)
    assert all(torch.equal(row, x) for row in rows)


def broadcast_and_reduce_with_every_root() -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for root in range(size()):
            x = values(rank(), (6,), dtype)
            dist.broadcast(x, src=root)
            same(x, values(root, (6,), dtype))
            if dtype is not torch.bool:
                y = values(rank(), (6,), dtype)
                dist.reduce(y, dst=root)
                mine = rank() == root
                same(y, everybody((6,), torch.float64).sum(0).to(dtype) if mine else values(rank(), (6,), dtype))


def gathers_in_every_type() -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for shape in SHAPES:
            x, expected = values(rank(), shape, dtype), everybody(shape, dtype)
            rows = [torch.empty_like(x) for _ in range(size())]
            dist.all_gather(rows, x)
            same(torch.stack(rows), expected)
            if shape:
                joined, stacked = x.new_empty(size() * shape[0], *shape[1:]), x.new_empty(size(), *shape)
                dist.all_gather_into_tensor(joined, x)
                dist.all_gather_into_tensor(stacked, x)
                same(joined, torch.cat(list(expected)))
                same(stacked, expected)
            root = size() - 1
            held = [torch.empty_like(x) for _ in range(size())] if rank() == root else None
            dist.gather(x, held, dst=root)
            if held is not None:
                same(torch.stack(held), expected)


def scatters_in_every_type() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        rows = [values(10 * r + rank(), (3, 2), dtype) for r in range(size())]  # the r-th goes to rank r
        x = torch.empty(3, 2, dtype=dtype)
        dist.scatter(x, rows if rank() == 1 else None, src=1)
        same(x, values(10 * rank() + 1, (3, 2), dtype))
        total = torch.stack([values(10 * rank() + r, (3, 2), torch.float64) for r in range(size())]).sum(0).to(dtype)
        y = torch.empty(3, 2, dtype=dtype)
        dist.reduce_scatter(y, rows)
        same(y, total)
        z = torch.empty(3, 2, dtype=dtype)
        dist.reduce_scatter_tensor(z, torch.cat(rows))
        same(z, total)
    a = torch.empty(3, 2)
    dist.reduce_scatter(
        a, [values(10 * r + rank(), (3, 2), torch.float32) for r in range(size())], op=dist.ReduceOp.AVG
    )
    same(a, torch.stack([values(10 * rank() + r, (3, 2), torch.float32) for r in range(size())]).sum(0) / size())


def all_to_all_with_equal_and_uneven_parts() -> None:
    rows = [torch.full((r + 1, 2), 100.0 * rank() + r) for r in range(size())]
    found = [torch.empty(rank() + 1, 2) for _ in range(size())]
    dist.all_to_all(found, rows)
    for r, row in enumerate(found):
        same(row, torch.full((rank() + 1, 2), 100.0 * r + rank()))
    joined = torch.empty(size() * (rank() + 1), 2)
    sizes = ([rank() + 1] * size(), [r + 1 for r in range(size())])
    dist.all_to_all_single(joined, torch.cat(rows), *sizes)
    same(joined, torch.cat(found))
    equal = torch.empty(size())
    dist.all_to_all_single(equal, torch.full((size(),), float(rank())))
    same(equal, torch.arange(size(), dtype=torch.float32))


def messages_arrive_in_their_order() -> None:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    out = [torch.full((n,), float(i)) for i, n in enumerate((1, 100_000, 3, 40_000, 1))]
    back = [torch.empty_like(x) for x in out]
    works = [dist.isend(x, right) for x in out] + [dist.irecv(x, left) for x in back]
    for work in reversed(works):
        work.wait()
    for x, y in zip(out, back, strict=True):
        same(y, x)
    with_tags = [dist.irecv(back[0], left, tag=7), dist.irecv(back[2], left, tag=3)]
    with_tags += [dist.isend(out[2], right, tag=3), dist.isend(out[0], right, tag=7)]
    for work in with_tags:
        work.wait()
    same(back[0], out[0])
    same(back[2], out[2])


def batches_blocking_calls_and_any_source() -> None:
    peer, x, y = rank() ^ 1, torch.full((5,), float(rank())), torch.empty(5)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]):
        work.wait()
    same(y, torch.full((5,), float(peer)))
    if rank() == 0:
        seen = {dist.recv(y) for _ in range(size() - 1)}
        assert seen == set(range(1, size()))
    else:
        dist.send(x, 0)
    with pytest.raises(UnsupportedOp, match="tag"):
        dist.isend(x, peer, tag=2**14)


def tensors_with_gaps_travel() -> None:
    x = torch.arange(12.0).view(3, 4).t()[::2]
    y = torch.zeros(4, 6)[:, 1:4][::2]
    works = [dist.isend(x, (rank() + 1) % size()), dist.irecv(y, (rank() - 1) % size())]
    for work in works:
        work.wait()
    same(y, x)
    z = torch.ones(4, 4)[:, ::2]
    dist.all_reduce(z)
    same(z, torch.full((4, 2), float(size())))
    dist.broadcast(z.t(), src=0)


def large_messages_travel_in_parts() -> None:
    before, mpi_buffers.CHUNK_BYTES = mpi_buffers.CHUNK_BYTES, 1000
    try:
        gathers_in_every_type()
        x = torch.arange(10_001.0) + rank()
        y = torch.empty_like(x)
        works = [dist.isend(x, (rank() + 1) % size()), dist.irecv(y, (rank() - 1) % size())]
        for work in works:
            work.wait()
        same(y, torch.arange(10_001.0) + (rank() - 1) % size())
        dist.all_reduce(x)
        same(x, torch.arange(10_001.0) * size() + sum(range(size())))
        dist.broadcast(y, src=0)
    finally:
        mpi_buffers.CHUNK_BYTES = before


def objects_travel() -> None:
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank() * 1000})
    assert [f["rank"] for f in found] == list(range(size()))
    said = [f"from {rank()}"]
    dist.broadcast_object_list(said, src=1)
    assert said == ["from 1"]


def groups_of_some_ranks() -> None:
    evens, odds = (dist.new_group([r for r in range(size()) if r % 2 == k]) for k in range(2))
    mine, others = (evens, odds) if rank() % 2 == 0 else (odds, evens)
    assert dist.get_rank(others) == -1
    x = torch.tensor([float(rank())])
    dist.all_reduce(x, group=mine)
    same(x, torch.tensor([float(sum(range(rank() % 2, size(), 2)))]))
    backwards = dist.new_group(list(range(size())))
    dist.broadcast(x, src=size() - 1, group=backwards)
    alone = [dist.new_group([r]) for r in range(size())][rank()]
    dist.all_reduce(x, group=alone)
    dist.destroy_process_group(backwards)
    with pytest.raises((PeerError, ValueError)):
        dist.all_reduce(x, group=backwards)


def a_gloo_group_lives_beside() -> None:
    group = dist.new_group(backend="gloo")
    x = torch.tensor([rank()], device="cpu")
    dist.all_reduce(x, group=group)
    same(x, torch.tensor([sum(range(size()))], device="cpu"))
    dist.destroy_process_group(group)


def a_wait_without_an_answer_ends() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    begun, burnt = time.monotonic(), time.thread_time()
    work = dist.irecv(torch.empty(3), (rank() + 1) % size(), group=group)
    with pytest.raises(PeerError, match="not answered in 1 s"):
        work.wait()
    assert 0.9 < time.monotonic() - begun < 10
    assert time.thread_time() - burnt < 0.5, "waiting took a core"
    assert not work.is_success()
    barrier = dist.irecv(torch.empty(3), (rank() + 1) % size(), group=group)
    with pytest.raises(PeerError, match=r"0\.2 s"):
        barrier.wait(timedelta(seconds=0.2))


def an_abort_ends_a_wait() -> None:
    group = dist.new_group()
    timer = threading.Timer(0.3, group.abort)
    timer.start()
    with pytest.raises(PeerError, match="given up"):
        dist.recv(torch.empty(3), (rank() + 1) % size(), group=group)
    timer.join()
    with pytest.raises(PeerError, match="given up"):
        dist.all_reduce(torch.ones(1), group=group)


def sizes_that_differ_are_noticed() -> None:
    for given, wanted in ((3, 5), (5, 3)):
        group = dist.new_group()
        works = [
            dist.isend(torch.ones(given), (rank() + 1) % size(), group=group),
            dist.irecv(torch.empty(wanted), (rank() - 1) % size(), group=group),
        ]
        works[0].wait()
        with pytest.raises(PeerError):
            works[1].wait()


def threads_may_call_at_once() -> None:
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[str] = []

    def work(index: int) -> None:
        try:
            for step in range(20):
                x = torch.full((50,), float(index + step + rank()))
                dist.all_reduce(x, group=groups[index])
                same(x, torch.full((50,), float(size() * (index + step) + sum(range(size())))))
                y = torch.empty(2000)
                ops = [
                    dist.P2POp(dist.isend, torch.full((2000,), float(step)), (rank() + 1) % size(), groups[index]),
                    dist.P2POp(dist.irecv, y, (rank() - 1) % size(), groups[index]),
                ]
                for each in dist.batch_isend_irecv(ops):
                    each.wait()
                same(y, torch.full((2000,), float(step)))
        except BaseException:
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def operations_move_on_while_nobody_waits() -> None:
    x, y = torch.full((2**20,), float(rank())), torch.empty(2**20)
    total = torch.ones(2**18)
    works: list[Any] = [dist.irecv(y, (rank() - 1) % size()), dist.isend(x, (rank() + 1) % size())]
    works.append(dist.all_reduce(total, async_op=True))
    until = time.monotonic() + 20
    while not all(work.arrived for work in works) and time.monotonic() < until:
        time.sleep(0.01)  # the thread alone calls MPI meanwhile
    assert all(work.arrived for work in works)
    for work in works:
        work.wait()
    same(y, torch.full((2**20,), float((rank() - 1) % size())))
    same(total, torch.full((2**18,), float(size())))


def futures_complete_by_themselves() -> None:
    x = torch.full((1000,), float(rank()))
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    same(future.wait(), torch.full((1000,), 2.0 * sum(range(size()))))
    dist.barrier()


def buffers_outlive_their_callers() -> None:
    for _ in range(20):
        dist.isend(torch.full((30_000,), 5.0), (rank() + 1) % size())  # nobody keeps the tensor or the work
    y = torch.empty(30_000)
    for _ in range(20):
        dist.recv(y, (rank() - 1) % size())
        same(y, torch.full((30_000,), 5.0))


def the_law_holds() -> None:
    torch.manual_seed(0)
    cases: list[tuple[nn.Module, Tensor]] = [
        (UNet(width=4, depth=2).double(), image(2, 3, 41, 36)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 5, stride=2, padding=2), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2)).double(),
            image(2, 3, 33, 27),
        ),
        (nn.ConvTranspose2d(3, 2, 3, stride=2).double(), image(2, 3, 17, 12)),
        (Expr("F.scaled_dot_product_attention(x, x, x)"), image(2, 3, 12, 8)),
    ]
    four = (Grid((2, 2), device=DEVICE), Grid((2, 1), data=2, device=DEVICE), Grid((4,), device=DEVICE))
    two = (Grid((2, 1), device=DEVICE), Grid((1,), data=2, device=DEVICE))
    for grid in four if size() == 4 else two:
        for module, x in cases:
            found = compare(module, [x], grid)
            wrong = {name: value for name, value in found.items() if not value <= 1e-10}
            assert not wrong, f"{grid}: {wrong}"


class Synchronous:
    """A communicator whose sends complete only when their receives have come."""

    def __init__(self, communicator: Any):
        self.communicator, self.Isend = communicator, communicator.Issend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.communicator, name)


def nothing_relies_on_buffers() -> None:
    operations = Grid((2, size() // 2)).mesh().transport.group.operations
    communicator, operations.communicator = operations.communicator, Synchronous(operations.communicator)
    try:
        the_law_holds()
    finally:
        operations.communicator = communicator


def training_gives_the_weights_of_one_device() -> None:
    grid = Grid((size() // 2, 1), data=2)
    torch.manual_seed(3)
    plain, sharded = (UNet(width=4, depth=2).double().to(DEVICE) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    for model in (plain, sharded):
        for step in range(4):
            x, target = (
                image(3, 3, 40, 44, seed=step).to(DEVICE),
                (image(3, 40, 44, seed=step + 50) > 0).long().to(DEVICE),
            )
            if model is sharded:
                loss = F.cross_entropy(model(grid.shard(x)), grid.shard(target, dims=(1, 2)))
            else:
                loss = F.cross_entropy(model(x), target)
            model.zero_grad()
            loss.backward()
            if model is sharded:
                mural.reduce_gradients(model, grid.mesh())
            with torch.no_grad():  # torch.optim would load torch's compiler first, for many seconds
                for p in model.parameters():
                    p -= 0.1 * p.grad
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-9


def ddp_runs_over_it() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(model)
    batch = image(size() * 3, 6)
    for wrapped, part in ((ddp, batch[3 * rank() : 3 * rank() + 3]), (plain, batch)):
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(part).square().mean().backward()
            optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-10


def a_lone_error_reaches_the_others() -> None:
    """Last: afterwards the mesh is of no use."""
    mesh = Grid((2, size() // 2)).mesh()
    x = mural.shard(image(1, 3, 16, 16).to(DEVICE), mesh)
    conv = nn.Conv2d(3, 3, 3, padding=1).double().to(DEVICE)

    class Broken(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return torch.fft.fft(y) if rank() == 1 else conv(conv(conv(y)))

    begun = time.monotonic()
    with pytest.raises(UnsupportedOp if rank() == 1 else PeerError) as caught:
        Broken()(x)
    assert rank() == 1 or "rank 1 raised UnsupportedOp" in str(caught.value)
    assert time.monotonic() - begun < 20


CHECKS: tuple[Callable[[], None], ...] = (
    all_reduce_sums_in_every_type,
    all_reduce_by_every_operation,
    all_reduce_of_truth_values_and_complex_numbers,
    half_precision_is_added_in_float32,
    every_rank_gets_the_same_bits,
    broadcast_and_reduce_with_every_root,
    gathers_in_every_type,
    scatters_in_every_type,
    all_to_all_with_equal_and_uneven_parts,
    messages_arrive_in_their_order,
    batches_blocking_calls_and_any_source,
    tensors_with_gaps_travel,
    large_messages_travel_in_parts,
    objects_travel,
    groups_of_some_ranks,
    a_gloo_group_lives_beside,
    a_wait_without_an_answer_ends,
    an_abort_ends_a_wait,
    sizes_that_differ_are_noticed,
    threads_may_call_at_once,
    operations_move_on_while_nobody_waits,
    futures_complete_by_themselves,
    buffers_outlive_their_callers,
    the_law_holds,
    nothing_relies_on_buffers,
    training_gives_the_weights_of_one_device,
    a_lone_error_reaches_the_others,
)


ON_HOST = (
    the_law_holds,
    nothing_relies_on_buffers,
    training_gives_the_weights_of_one_device,
    ddp_runs_over_it,
    a_lone_error_reaches_the_others,
)
"""Those that bring their tensors to the device themselves."""
SLOW: tuple[Callable[[], None], ...] = (ddp_runs_over_it,)


def main(folder: Path, checks: tuple[Callable[[], None], ...]) -> None:
    torch.set_num_threads(1)
    assert "mpi4py" not in sys.modules, "importing mural loads mpi4py"
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(16 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    mpi.register()
    dist.init_process_group(mpi.NAME, init_method=mpi.METHOD, timeout=timedelta(seconds=60))
    found: dict[str, str] = {}
    for check in checks:
        begun = time.monotonic()
        try:
            with torch.device(DEVICE if check not in ON_HOST else "cpu"):
                check()
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = traceback.format_exc()
        dist.barrier()  # messages of the next check shall not meet those of this one
        print(f"{rank()} {check.__name__} {time.monotonic() - begun:.2f} s", flush=True)
        (folder / f"{rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), SLOW if sys.argv[2] == "slow" else CHECKS)
