"""Plans in bfloat16 of models by their last operation: a cast there must not cut the gradient off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural.ranks import Mesh
from mural.shard import ShardedTensor
from mural.shard.meta_autocast import meta_autocast

LAST: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"interpolate {mode}": lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "interpolate to a size": lambda x: F.interpolate(x, size=(31, 33), mode="bilinear", align_corners=True),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "average pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 4),
    "softmax": lambda x: F.softmax(x, 1),
    "log softmax": lambda x: F.log_softmax(x, 1),
    "cast": lambda x: x.float(),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


class Ends(nn.Module):
    """A convolution and one more operation."""

    def __init__(self, last: Callable[[Tensor], Tensor], dims: int = 2):
        super().__init__()
        self.first, self.last = (nn.Conv2d if dims == 2 else nn.Conv3d)(3, 3, 3, padding=1), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_any_last_operation_is_planned(name: str, precision: str) -> None:
    """Models that end with F.interpolate were refused: «element 0 of tensors does not require grad»."""
    found = mural.plan(Ends(LAST[name]), (3, 16, 16), batch=2, memory="1GiB", precision=precision)  # type: ignore[arg-type]
    assert found.precision == precision


@pytest.mark.parametrize("mode", ["trilinear", "nearest", "area"])
def test_volumes(mode: str) -> None:
    model = Ends(lambda x: F.interpolate(x, scale_factor=2, mode=mode), 3)
    assert mural.plan(model, (3, 8, 8, 8), memory="1GiB", precision="bfloat16").memory == "1GiB"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["reflect", "replicate", "nearest", "bilinear", "bicubic", "area"])
def test_gradients_pass_a_cast_of_autocast(device: str, name: str) -> None:
    """The cast was made without gradients, so that nothing was trained of what comes before: in real steps, too.

    A CPU casts what it pads; a GPU, and its stand-in without memory, what they interpolate.
    """

    def last(x: Tensor) -> Tensor:
        if name in ("reflect", "replicate"):
            return F.pad(x, (1, 1, 1, 1), mode=name)
        return F.interpolate(x, scale_factor=2, mode=name)

    x = torch.arange(60.0).reshape(1, 2, 6, 5).to(device, torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if device == "cpu" else meta_autocast(torch.bfloat16):
        plain, sharded = last(x), last(mural.shard(x, Mesh.of_one()))
    assert sharded.requires_grad
    if device == "cpu" and isinstance(sharded, ShardedTensor):
        assert sharded.dtype == plain.dtype
        wanted, found = (torch.autograd.grad(y.float().square().sum(), x)[0] for y in (plain, sharded.full()))
        assert torch.allclose(found, wanted, rtol=2**-6)
