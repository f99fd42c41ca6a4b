"""Offload on a GPU: the same bits as without, whatever the streams do, and peaks as predicted."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.comm.copy_streams import CudaLanes
from mural.engine import offloading
from mural.engine.parallel import Parallel
from mural.models import UNet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = ("activations", "parameters", "optimizer")


def trained(pm: Parallel, side: int, steps: int = 6) -> list[Any]:
    """Losses and gradients of some steps, and the weights after them."""
    optimizer, found = torch.optim.Adam(pm.parameters(), 1e-3), list[Any]()
    for step in range(steps):
        draws = torch.Generator("cuda").manual_seed(step)
        image = torch.randn(2, 3, side, side, generator=draws, device="cuda")
        target = torch.randint(0, 2, (2, side, side), generator=draws, device="cuda")
        optimizer.zero_grad()
        found.append(pm.step(image, target))
        found += [p.grad.clone() for p in pm.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *pm.state_dict().values()]


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether all numbers are the same bits."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def small() -> nn.Module:
    """A U-Net, the same each time."""
    torch.manual_seed(1)
    return UNet(width=8, depth=3).cuda()


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels that give the same bits each time, and no block that is too small to leave."""
    monkeypatch.setitem(offloading.LEAST, "cuda", 1)
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recompute", [(), "all"])
def test_streams_at_any_speed(seed: int, recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(mural.parallelize(small(), mural.Plan(recompute=recompute)), 64)
    draws, copies = random.Random(seed), CudaLanes.copies

    def late(self: CudaLanes, pairs: Any, outward: bool, after: Any) -> Any:
        with torch.cuda.stream(self.outward if outward else self.inward):
            torch.cuda._sleep(draws.choice((0, 0, 10**5, 10**6)))  # type: ignore[attr-defined]
        torch.cuda._sleep(draws.choice((0, 0, 0, 10**5)))  # type: ignore[attr-defined]
        return copies(self, pairs, outward, after)

    monkeypatch.setattr(CudaLanes, "copies", late)
    for limit in ("", "1MB", "8MB"):
        pm = mural.parallelize(small(), mural.Plan(offload=KINDS, memory=limit, recompute=recompute))
        assert same(trained(pm, 64), plain), limit
        assert pm.offloading is not None
        assert not pm.offloading.lost
        if limit:
            assert pm.offloading.memory.moved[0] > 0


def test_the_peak_is_as_predicted() -> None:
    model = small()
    pm = mural.parallelize(deepcopy(model), mural.Plan(offload=("activations",)))
    trained(pm, 512, 3)
    assert pm.offloading is not None
    (known,) = pm.offloading.known.values()
    whole = max(known.trace.bytes)
    pm = mural.parallelize(model, mural.Plan(offload=("activations",), memory=f"{int(0.7 * whole)}"))
    trained(pm, 512, 4)
    assert pm.offloading is not None
    torch.cuda.reset_peak_memory_stats()
    image, target = torch.zeros(2, 3, 512, 512, device="cuda"), torch.zeros(2, 512, 512, device="cuda").long()
    before = torch.cuda.memory_allocated()
    pm.step(image, target)
    assert pm.offloading.plan is not None
    assert torch.cuda.max_memory_allocated() == pytest.approx(pm.offloading.plan.peak, rel=0.05)
    assert before < pm.offloading.plan.peak < 0.7 * whole


def test_updates_in_chunks_on_a_gpu() -> None:
    def stack() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(*(nn.Conv2d(256, 256, 1) for _ in range(12))).cuda()

    found: list[list[Tensor]] = []
    for plan in (mural.Plan(), mural.Plan(offload=("optimizer",), memory="8MB")):
        pm = mural.parallelize(stack(), plan, loss=F.mse_loss)
        optimizer = torch.optim.Adam(pm.parameters(), 1e-3)
        for step in range(4):
            image = torch.full((2, 256, 4, 4), step + 0.5, device="cuda")
            optimizer.zero_grad()
            pm.step(image, image)
            optimizer.step()
        found.append([*pm.state_dict().values()])
        if pm.offloading is not None:
            numbers = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.ndim]
            assert {t.device.type for t in numbers} == {"cpu"}
    assert same(*found)
