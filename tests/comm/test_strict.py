"""The law on a transport that behaves like NCCL, and that transport itself: it finds out what gloo lets pass."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strict_stream import StrictError
from torch import Tensor, nn

import mural
from law import Expr, Grid, compare, image, loss_of
from mural.models import UNet
from mural.shard.halo.fuse import fusing
from ranks import restart, run_on

SHORT = timedelta(seconds=2)


def strictly(world: int, function: Any, *args: Any) -> list[Any]:
    """The results of a function on every rank of a strict world."""
    return run_on(world, function, *args, backend="strict")


def holds(module: nn.Module, inputs: Tensor | list[Tensor], grid: Grid) -> None:
    """The law, on a strict world."""
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    for rank, found in enumerate(strictly(grid.world, compare, module, inputs, grid, True)):
        wrong = {name: value for name, value in found.items() if not value <= 1e-10}
        assert not wrong, f"rank {rank} of {grid}: {wrong}"


# ------------------------------------------------------------------------------------------------- the transport itself


def a_send_waits_for_its_receive() -> tuple[bool, bool]:
    rank, x = dist.get_rank(), torch.full((1000,), 3.0)
    if rank == 0:
        work = dist.isend(x, 1)
        early = work.over.wait(0.3)
        dist.barrier()
        work.wait()
        return early, True
    dist.barrier()
    y = torch.empty(1000)
    dist.recv(y, 0)
    return False, torch.equal(x, y)


def test_a_send_completes_when_its_receive_has_come() -> None:
    assert strictly(2, a_send_waits_for_its_receive) == [(False, True), (False, True)]


def both_send_first(batched: str) -> str:
    """Two ranks that send to each other and then receive; over gloo, whose sends are buffered, this passes."""
    group = dist.new_group(timeout=SHORT)
    peer, x, y = 1 - dist.get_rank(), torch.ones(4), torch.empty(4)
    send, receive = dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, y, peer, group)
    try:
        if batched == "together":
            works = dist.batch_isend_irecv([send, receive])
        elif batched == "one after the other":
            works = [*dist.batch_isend_irecv([send]), *dist.batch_isend_irecv([receive])]
        else:
            works = [dist.isend(x, peer, group=group), dist.irecv(y, peer, group=group)]
        for work in works:
            work.wait()
    except StrictError as error:
        return str(error)
    return f"{y.sum().item():g}"


def test_messages_of_one_batch_travel_together() -> None:
    assert strictly(2, both_send_first, "together") == ["4", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("batched", ["one after the other", "lone"])
def test_sends_that_rely_on_a_buffer_are_found(batched: str) -> None:
    for text in strictly(2, both_send_first, batched):
        assert "not answered in 2 s" in text
        for rank in (0, 1):
            assert f"rank {rank} waits for:" in text
            assert f"send to {1 - rank} of 16 bytes" in text


def wrong_sizes() -> str:
    rank, group = dist.get_rank(), dist.new_group()
    call = dist.isend if rank == 0 else dist.irecv
    try:
        dist.batch_isend_irecv([dist.P2POp(call, torch.zeros(3 + rank), 1 - rank, group)])[0].wait()
    except StrictError as error:
        return str(error)
    return ""


def wrong_collectives(what: str) -> str:
    rank, group = dist.get_rank(), dist.new_group()
    try:
        if what == "shape":
            dist.all_reduce(torch.zeros(3 + rank), group=group)
        elif rank == 0:
            dist.all_reduce(torch.zeros(3), group=group)
        else:
            dist.broadcast(torch.zeros(3), src=0, group=group)
    except StrictError as error:
        return str(error)
    return ""


def tagged() -> list[str]:
    found: list[str] = []
    for call in (
        lambda: dist.isend(torch.ones(1), 1 - dist.get_rank(), tag=3),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 1 - dist.get_rank(), tag=3)]),
    ):
        try:
            call()
        except StrictError as error:
            found.append(str(error))
    return found


def test_what_does_not_fit_together_is_an_error() -> None:
    assert ["12 bytes" in text and "16 bytes" in text for text in strictly(2, wrong_sizes)] == [True, True]
    for text in strictly(2, wrong_collectives, "shape"):
        assert "0: allreduce (3,) torch.float32; 1: allreduce (4,) torch.float32" in text
    for text in strictly(2, wrong_collectives, "kind"):
        assert "0: allreduce" in text
        assert "1: broadcast" in text
    for texts in strictly(2, tagged):
        assert ["NCCL ignores tags" in text for text in texts] == [True, True]


def order_and_collectives() -> bool:
    """Many batches and collectives, posted before any is waited for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    works: list[Any] = []
    results: list[tuple[Tensor, float]] = []
    for step in range(10):
        out = [torch.full((n,), 10.0 * step + i) for i, n in enumerate((1, 500, 3))]
        back = [torch.empty_like(x) for x in out]
        operations = [dist.P2POp(dist.isend, x, right) for x in out] + [dist.P2POp(dist.irecv, x, left) for x in back]
        works += dist.batch_isend_irecv(operations)
        total = torch.tensor([float(rank + step)])
        works.append(dist.all_reduce(total, op=dist.ReduceOp.AVG, async_op=True))
        results += [(y, 10.0 * step + i) for i, y in enumerate(back)] + [(total, step + (world - 1) / 2)]
    for work in works:
        work.wait()
    return all(bool((tensor == value).all()) for tensor, value in results)


def test_everything_runs_in_the_order_of_the_calls() -> None:
    assert strictly(2, order_and_collectives) == [True, True]


def given_up() -> str:
    group: Any = dist.new_group()
    timer = threading.Timer(0.2, group.abort)
    timer.start()
    try:
        dist.all_reduce(torch.ones(1), group=group) if dist.get_rank() == 0 else None
    except StrictError as error:
        return str(error)
    return "aborted"


def test_an_abort_ends_a_wait() -> None:
    assert all("aborted" in text for text in strictly(2, given_up))


# -------------------------------------------------------------------------------------------------------------- the law


class Block(nn.Sequential):
    """Convolution, norm, pool and transposed convolution."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 5, stride=2, padding=2, bias=False),  # behind a norm, a bias has no gradient
            nn.BatchNorm2d(4),
            nn.MaxPool2d(3, stride=1, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1, bias=False),
            nn.InstanceNorm2d(2, affine=True),
        )


CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "block": (Block(), image(2, 3, 33, 26)),
    "deep halos": (nn.Conv2d(3, 2, 9, padding=8, dilation=2), image(2, 3, 12, 21)),
    "average": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), image(2, 3, 17, 23)),
    "resize": (Expr("F.interpolate(x, scale_factor=1.7, mode='bilinear')"), image(2, 3, 14, 11)),
    "attention": (Expr("F.scaled_dot_product_attention(x, x, x)"), image(2, 3, 12, 8)),
    "softmax and mean": (Expr("x.softmax(2).mean((2, 3)) + x.amax((2, 3))"), image(2, 3, 12, 9)),
    "flip and roll": (Expr("torch.roll(x.flip(2), 5, 3) + x"), image(2, 3, 13, 10)),
    "U-Net": (UNet(width=4, depth=2), image(2, 3, 37, 30)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grid", [Grid((2, 1)), Grid((1,), data=2)], ids=["spatial", "data"])
def test_law_on_two_ranks(name: str, grid: Grid) -> None:
    module, x = CASES[name]
    holds(module.double(), x, grid)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grid", [Grid((2, 2)), Grid((2, 1), data=2), Grid((4, 1))], ids=["2x2", "data", "rows"])
def test_law_on_four_ranks(name: str, grid: Grid) -> None:
    module, x = CASES[name]
    holds(module.double(), x, grid)


def fused_difference(module: nn.Module, x: Tensor, grid: Grid) -> float:
    """How far halos that are exchanged once for several layers lead from plain gradients."""
    with fusing(True):
        for _ in range(3):  # the first run teaches what follows what
            module.zero_grad()
            loss_of(module(grid.shard(x))).backward()
            mural.reduce_gradients(module, grid.mesh())
        found = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss_of(module(x)).backward()
    pairs = zip(found, module.parameters(), strict=True)
    return max(float((g - p.grad).abs().max() / p.grad.abs().max()) for g, p in pairs)


def test_fused_halos_on_two_ranks() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())]
    module = nn.Sequential(*layers).double()
    assert max(strictly(2, fused_difference, module, image(1, 3, 48, 20), Grid((2, 1)))) < 1e-10


def lone_error() -> str:
    x = Grid((2, 1)).shard(image(1, 3, 16, 16))
    conv = nn.Conv2d(3, 3, 3, padding=1).double()
    try:
        _ = torch.fft.fft(x) if dist.get_rank() == 1 else conv(conv(x))
    except mural.UnsupportedOp:
        return "own"
    except mural.PeerError as error:
        return str(error)
    return "nothing"


def test_a_lone_error_ends_the_waits_of_the_others() -> None:
    texts = strictly(2, lone_error)
    restart(2, "strict")
    assert "rank 1 raised UnsupportedOp" in texts[0]
    assert texts[1] == "own"
