"""Kernels for norms of channels-last tensors: the same numbers as plain torch, on any number of rows and channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from mural.errors import LayoutError
from mural.memory import fused_steps, recorded_tiles
from mural.memory.tape import Tape
from mural.models import UNet
from mural.shard.ops.norm import channel_kernels, normalized_rows, tile_norm
from mural.shard.ops.norm.channel_kernels import fast, gradients_on_cpu, moments_on_cpu, operations
from mural.shard.ops.norm.normalized_rows import merge_moments
from streamed_law import check_steps, images

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(1, 64, 130, 70), (2, 3, 5, 7), (1, 130, 9, 11), (3, 2, 1, 1), (1, 33, 3, 4, 70), (1, 1024, 8, 8)]


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that are far from 0, channels last."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 5
    return values.to(dtype).to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)


def vectors(channels: int) -> list[Tensor]:
    return [torch.rand(channels, generator=torch.Generator().manual_seed(seed)) * 4 for seed in range(3)]


@needs_gpu
@pytest.mark.parametrize("dtype", channel_kernels.NARROW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad = drawn(shape, 0, dtype), drawn(shape, 1, dtype)
    mean, scale, shift = vectors(shape[1])
    there = [tensor.cuda() for tensor in (x, grad, mean, scale, shift)]
    assert fast(*there[:2])
    exact = 1e-6 if dtype == torch.float32 else 1e-2
    for relu in (False, True):
        expected = operations.channel_affine(x.double(), *(v.double() for v in (mean, scale, shift + 3)), relu)
        found = operations.channel_affine(there[0], there[2], there[3], there[4] + 3, relu)
        assert found.dtype == dtype
        assert found.stride() == x.stride()
        torch.testing.assert_close(found.cpu().double(), expected, rtol=exact, atol=exact)
    torch.testing.assert_close(
        merge_moments(operations.channel_moments(there[0])).cpu().double(), moments_on_cpu(x.double())[0],
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    of_x, sums = operations.channel_gradients(there[1], there[0], there[2], there[3])
    expected = gradients_on_cpu(grad.double(), x.double(), mean.double(), scale.double())
    torch.testing.assert_close(of_x.cpu().double(), expected[0], rtol=exact, atol=exact)
    torch.testing.assert_close(sums.cpu().double(), expected[1], rtol=1e-4, atol=1e-2)
    y = drawn(shape, 2, dtype) - 5
    expected = gradients_on_cpu(*(t.double() for t in (grad, x, mean, scale, y)))
    found = operations.channel_gradients(there[1], there[0], there[2], there[3], y.cuda())
    torch.testing.assert_close(found[0].cpu().double(), expected[0], rtol=exact, atol=exact)
    torch.testing.assert_close(found[1].cpu().double(), expected[1], rtol=1e-4, atol=1e-2)
    again = operations.channel_gradients(there[1], there[0], there[2], there[3])
    assert all(a.equal(b) for a, b in zip((of_x, sums), again, strict=True)), "the same bits"


@needs_gpu
def test_vectors_of_any_type_and_stride() -> None:
    """Kernels read them from memory as they lie there."""
    x = drawn((1, 6, 4, 5), 0).cuda()
    wide = [torch.rand(6, 2, dtype=dtype).cuda() for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    found = operations.channel_affine(x, *(v[:, 1] for v in wide))
    torch.testing.assert_close(found, operations.channel_affine(x, *(v[:, 1].float().clone() for v in wide)))


@needs_gpu
def test_other_strides_raise() -> None:
    x, vector = torch.rand(1, 6, 4, 5).cuda(), torch.rand(6).cuda()
    with pytest.raises(LayoutError, match="channels-last"):
        operations.channel_affine(x, vector, vector, vector)


@needs_gpu
def test_what_is_no_number_stays_so() -> None:
    x = torch.tensor([float("nan"), -1.0, float("inf")]).view(1, 3, 1, 1).cuda()
    one, zero = torch.ones(3).cuda(), torch.zeros(3).cuda()
    found = operations.channel_affine(x, zero, one, zero, True).flatten().tolist()
    assert found[0] != found[0]
    assert found[1:] == [0, float("inf")]


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(1, 4, 3, 3), torch.rand(1, 4, 3, 3).to(memory_format=torch.channels_last), torch.rand(2, 3)],
)
def test_other_tensors_are_not_for_these_kernels(tensor: Tensor) -> None:
    assert not fast(tensor)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """These operations on a CPU, too, in plain torch."""
    for module in (tile_norm, normalized_rows):
        monkeypatch.setattr(module, "fast", lambda *tensors: all(t.is_cpu and t.ndim == 4 for t in tensors))


class Activated(nn.Module):
    """A norm whose result is read by an activation alone, or by others as well."""

    def __init__(self, activate: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.norm, self.activate = nn.BatchNorm2d(4), activate

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activate(self.norm(self.first(x))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "in place": lambda x: F.relu(x, inplace=True),
    "read before": lambda x: x.mul(2) + F.relu(x),
    "read after": lambda x: F.relu(x) + x,
    "read after, in place": lambda x: F.relu(x, inplace=True) + x,
    "none": lambda x: x.sigmoid(),
}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law holds with these operations, from tapes in which activations are joined to norms."""
    joined, back = list[int](), list[int]()

    def watched(steps: Any, results: Any) -> Any:
        found = fused_steps.fused(steps, results)
        back.append(sum(step[0] is fused_steps.GRADIENTS and len(step[1]) == 5 for step in found))
        joined.append(len(steps) - len(found) - back[-1])
        return found

    monkeypatch.setattr(recorded_tiles, "fused", watched)
    torch.manual_seed(0)
    model = Activated(ACTIVATIONS[name]).double()
    target = torch.randint(0, 3, (1, 60, 66), generator=torch.Generator().manual_seed(3))
    check_steps(model, F.cross_entropy, [(x, target) for x in images(1, (60, 66))], mural.Plan(stream=(10, 11)))
    assert bool(sum(joined)) == (name in ("relu", "in place", "read after, in place"))
    assert bool(sum(back)) == bool(sum(joined))


@pytest.mark.usefixtures("everywhere")
def test_a_unet() -> None:
    torch.manual_seed(0)
    model = UNet(in_channels=2, width=2, depth=2, classes=3).double()
    target = torch.randint(0, 3, (2, 40, 36), generator=torch.Generator().manual_seed(3))
    check_steps(model, F.cross_entropy, [(x, target) for x in images(2, (40, 36))], mural.Plan(stream=(12, 10)))


def test_a_result_that_is_returned_is_not_activated() -> None:
    x, vector = torch.rand(1, 3, 4, 4), torch.rand(3)
    with Tape([x, vector]) as tape:
        made = operations.channel_affine(x, vector, vector, vector)
        active = made.relu()
    tape.end([made, active])
    assert fused_steps.fused(tape.steps, tape.results) == tape.steps
    tape.results = tape.results[1:]
    (step,) = fused_steps.fused(tape.steps, tape.results)
    assert tape.replay([step])(x, vector)[0].equal(active)
