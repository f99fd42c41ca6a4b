"""1 × 1 convolutions with few outputs: the gradients of torch's own convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mural
from mural.shard.ops.windowed.few_outputs import FewOutputs

CONVS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dims", CONVS)
def test_gradients(dims: int, bias: bool) -> None:
    torch.manual_seed(dims)
    x = torch.rand(2, 5, *(4, 3, 6)[:dims], dtype=torch.float64, requires_grad=True)
    given = [torch.rand(3, 5, *(1,) * dims, dtype=torch.float64), *([torch.rand(3, dtype=torch.float64)] * bias)]
    leaves = [x, *(tensor.requires_grad_() for tensor in given)]

    def few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return FewOutputs.apply(CONVS[dims], x, weight, bias)

    grads = [torch.autograd.grad(run(*leaves).sin().sum(), leaves) for run in (few, CONVS[dims])]
    assert all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(*grads, strict=True))
    assert torch.autograd.gradgradcheck(few, leaves)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_the_gradients_that_are_wanted(wanted: tuple[bool, ...]) -> None:
    given = [torch.rand(1, 4, 3, 3), torch.rand(2, 4, 1, 1), torch.rand(2)]
    leaves = [tensor.requires_grad_(want) for tensor, want in zip(given, wanted, strict=True)]
    FewOutputs.apply(F.conv2d, *leaves).sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("outputs", [1, 2, 4, 5])
def test_streamed_on_a_gpu(outputs: int, autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, outputs, 1)).cuda()
    model = model if autocast else model.bfloat16()
    image = torch.rand(1, 3, 96, 80, device="cuda", dtype=torch.float32 if autocast else torch.bfloat16)
    target = torch.rand(1, outputs, 96, 80, device="cuda", dtype=image.dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        F.mse_loss(model(image), target).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    plan = mural.Plan(stream=(32, 32), precision="bfloat16" if autocast else "float32")
    mural.parallelize(model, plan, loss=F.mse_loss).step(image, target)
    for mine, theirs in zip((p.grad for p in model.parameters()), plain, strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()
