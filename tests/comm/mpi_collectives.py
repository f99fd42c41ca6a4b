"""Checks of the collectives over MPI: every call, type and shape, on all ranks of one mpirun."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi_values import FLOATS, INTEGERS, SHAPES, everybody, fractions, rank, same, size, values

from mural.errors import UnsupportedOp


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


def objects_travel() -> None:
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank() * 1000})
    assert [f["rank"] for f in found] == list(range(size()))
    said = [f"from {rank()}"]
    dist.broadcast_object_list(said, src=1)
    assert said == ["from 1"]
