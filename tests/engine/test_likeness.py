"""Inputs that differ between ranks: a plain tensor is the same everywhere, and the ranks say where it is not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mural
from law import Grid, image, raises
from mural.engine.same_inputs import due
from mural.shard import place
from mural.shard.checksum import checksum
from ranks import run_on

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "spatial": {"spatial": (2, 1)},
    "channel": {"channel": 2, "channel_layers": "all"},
    "average": {"data": 2, "average": 2},
    "micro-batches": {"data": 2, "schedule": "gpipe", "microbatches": 2},
    "1f1b": {"stage": 2, "schedule": "1f1b", "microbatches": 2},
    "gpipe": {"stage": 2, "schedule": "gpipe", "microbatches": 2},
    "gems": {"stage": 2, "schedule": "gems", "microbatches": 2},
}

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- checksums


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.complex(*(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))).to(
            dtype
        )
    return (torch.randn(shape, generator=generator) * 9).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (8,), (3, 5), (2, 3, 6, 10), (1, 2, 3, 5, 7)], ids=str)
def test_a_checksum_is_that_of_the_values_wherever_they_lie(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(shape, dtype)
    turned = x.mT.contiguous().mT if x.ndim > 1 else x
    room = torch.zeros(x.numel() + 1, dtype=dtype)
    room[1:] = x.flatten()
    for same in (x.clone(), turned, room[1:].view(shape), torch.stack([x, x], -1)[..., 1]):
        assert checksum(same) == checksum(x)
    assert -(2**63) <= checksum(x) < 2**63


@given(st.data())
def test_other_values_or_places_have_another_checksum(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([d for d in DTYPES if d != torch.bool]))
    shape = tuple(data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=4)))
    x = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape) % 121
    dim = data.draw(st.integers(0, len(shape) - 1))
    other = data.draw(st.sampled_from(["flip", "roll", "value"]))
    y = {"flip": x.flip(dim), "roll": x.roll(1, dim), "value": x.clone()}[other]
    if other == "value":
        y.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = 123
    assert torch.equal(x, y) == (checksum(x.to(dtype)) == checksum(y.to(dtype)))


def test_checksums_of_nothing_and_of_what_is_no_number() -> None:
    assert checksum(torch.empty(0, 3)) == checksum(torch.empty(2, 3, device="meta")) == 0
    x = torch.full((3, 4), torch.nan)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(torch.full((3, 4), torch.inf))


def test_large_tensors_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = values((2, 3, 12, 10), torch.float32)
    whole = checksum(x)
    for limit in (1, 10, 25, 130, 400):
        monkeypatch.setattr(import_module("mural.shard.checksum"), "CPU_BLOCK", limit)
        assert checksum(x) == checksum(x.contiguous(memory_format=torch.channels_last)) == whole


# --------------------------------------------------------------------------------------------------------------- steps


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)
    return nn.Sequential(*layers).double()


def sampled(options: dict[str, Any]) -> list[str]:
    """A loop as Lightning and Accelerate set it up: each rank's loader draws other images; then one with the same."""
    images, masks = image(8, 3, 12, 10), torch.zeros(8, 12, 10).long()
    rank, texts = dist.get_rank(), list[str]()
    dataset = TensorDataset(images, masks)
    pm = mural.parallelize(made(), mural.Plan(**options))
    for sampler in (DistributedSampler(dataset, 2, rank, shuffle=False), None):
        try:
            for batch, target in DataLoader(dataset, 4, sampler=sampler):
                texts.append(f"{float(pm.step(batch, target)):.6f}")
        except mural.LayoutError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("name", PLANS)
def test_images_of_a_distributed_sampler_are_refused_on_every_rank(name: str) -> None:
    x = image(8, 3, 12, 10)
    good = [
        f"{float(F.cross_entropy(made()(part), torch.zeros(4, 12, 10).long()).detach()):.6f}" for part in x.split(4)
    ]
    for refused, *losses in run_on(2, sampled, PLANS[name]):
        assert "image has other values on rank 1 than on rank 0" in refused
        assert "DistributedSampler" in refused
        assert "use_distributed_sampler=False" in refused
        assert "prepare()" in refused
        assert losses == good


def differing(options: dict[str, Any], what: str) -> None:
    """Inputs of which one differs on rank 1."""
    second = dist.get_rank() == 1
    x, target = image(4, 3, 12, 10), torch.zeros(4, 12, 10).long()
    if what == "a flip":
        x = x.flip(3) if second else x
    elif what == "a target":
        target[3, 11, 9] = int(second)
    elif what == "a type":
        target = target.int() if second else target
    elif what == "a later step":
        x = x.clone()
    goal: Any = {"mask": target, "more": (target, [target + int(second)])} if what == "a dict" else target
    loss = (lambda y, t: F.cross_entropy(y, t["mask"])) if what == "a dict" else F.cross_entropy
    pm = mural.parallelize(made(), mural.Plan(**options), loss)
    if what == "inference":
        pm(x + int(second))
    elif what == "evaluation":
        pm.evaluate(x + int(second), goal)
    else:
        for step in range(5 if what == "a later step" else 1):
            pm.step(x + (1.0 if second and step == 4 else 0.0), goal)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a flip", "image has other values on rank 1"),
        ("a target", "target has other values on rank 1"),
        ("a type", "torch.int64 on rank 0, but a tensor of shape (4, 12, 10), torch.int32 on rank 1"),
        ("a dict", "target['more'][1][0] has other values"),
        ("inference", "image has other values"),
        ("evaluation", "image has other values"),
        ("a later step", "image has other values"),
    ],
)
@pytest.mark.parametrize("name", ["spatial", "1f1b"])
def test_the_input_that_differs_is_named(name: str, what: str, said: str) -> None:
    raises(said, mural.LayoutError, differing, PLANS[name], what)


def alike(options: dict[str, Any]) -> int:
    """Steps with equal tensors and with pieces pass; the messages of a step that is not compared."""
    plan = mural.Plan(**options)
    pm = mural.parallelize(made(), plan)
    x, target = image(4, 3, 12, 10), torch.zeros(4, 12, 10).long()
    x[0, 0, 0, 0] = torch.nan
    for _ in range(3):
        pm.step(x, target)
    mesh = pm.mesh
    own = torch.full((4, 3, 6, 10), float(mesh.rank)).double()
    rows = (0, 6) if mesh.rank == 0 else (6, 12)
    pm.step(mural.shard(own, mesh, box=((0, 4), (0, 3), rows, (0, 10))), target)
    before = pm.same_inputs.calls["step"]
    while not due(before):
        pm.step(x, target)
        before += 1
    pm.step(x, target)
    with mesh.transport.record() as record:
        pm.step(x, target)
    return sum(count for name, (count, _) in record.named.items() if name == "inputs")


def test_steps_that_are_not_compared_send_nothing_for_it() -> None:
    assert run_on(2, alike, PLANS["spatial"]) == [0, 0]


def sources(options: dict[str, Any]) -> None:
    """Each rank's loader drew another file."""
    name = f"slide{dist.get_rank()}.tif"
    source = mural.data.ArraySource(image(3, 12, 10), name)
    mural.parallelize(made(), mural.Plan(**options)).step([source], torch.zeros(1, 12, 10).long())


def test_other_sources_on_each_rank_are_refused() -> None:
    raises("slide1.tif", mural.LayoutError, sources, PLANS["spatial"])


# --------------------------------------------------------------------------------------------------------------- shard


def sharded(what: str) -> None:
    mesh = Grid((2, 1)).mesh()
    # Tensors of a kind that no other test gave to these ranks.
    x = image(1, 3, 12, 12).to(torch.bfloat16 if what == "later" else torch.float16)
    for number in range(1, 9):
        late = number == 8 and mesh.rank == 1
        mural.shard(x + float(late if what == "later" else mesh.rank), mesh)


@pytest.mark.parametrize("what", ["first", "later"])
def test_shard_refuses_tensors_that_differ_between_ranks(what: str) -> None:
    raises("has other values on ranks [1] than on rank 0. A plain tensor", mural.LayoutError, sharded, what)


def out_of_step() -> int:
    """Rank 1 alone has looked at more tensors of a kind, as after a call that failed there."""
    mesh, x = Grid((2, 1)).mesh(), image(1, 3, 12, 12).to(torch.float32)
    for _ in range(5 * mesh.rank):
        place.due(x, mesh)
    return sum(mural.shard(x, mesh).shape[0] for _ in range(20))


def test_ranks_that_look_at_different_tensors_raise_no_alarm() -> None:
    assert run_on(2, out_of_step) == [20, 20]
