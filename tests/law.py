"""The one law: sharded equals plain, forward and backward, in float64 to 1e-10.

With the environment's FUSED=1, every case runs twice and halos are fused wherever they can be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import mural
from mural.comm.failure.shared_fate import given_up
from mural.shard.halo.fuse import fusing
from ranks import DEVICE, run_on

TOLERANCE = 1e-10
FUSED = os.environ.get("FUSED") == "1"
_always = fusing(True)
if FUSED:
    _always.__enter__()
_meshes: dict[Any, mural.Mesh] = {}


@dataclass(frozen=True)
class Grid:
    """How the ranks are arranged and the image is cut."""

    spatial: tuple[int, ...] = ()
    data: int = 1
    cuts: Any = None
    dims: tuple[int, ...] | None = None
    align: int = 1
    device: str = DEVICE

    @property
    def world(self) -> int:
        """The number of ranks."""
        total = self.data
        for n in self.spatial:
            total *= n
        return total

    def mesh(self) -> mural.Mesh:
        """The mesh, on a rank."""
        key = (self.spatial, self.data)
        if key not in _meshes or given_up(_meshes[key].transport):  # an earlier test let a step fail
            _meshes[key] = mural.init(spatial=self.spatial, data=self.data)
        return _meshes[key]

    def shard(self, x: Tensor, **more: Any) -> mural.ShardedTensor:
        """A tensor cut this way."""
        return mural.shard(x, self.mesh(), **({"cuts": self.cuts, "dims": self.dims, "align": self.align} | more))


def since(version: str, *cases: Any) -> list[Any]:
    """Cases that torch can do from a version on."""
    mark = pytest.mark.skipif(TorchVersion(torch.__version__) < version, reason=f"torch can do it since {version}")
    return [pytest.param(case, marks=mark) for case in cases]


def some(grids: Sequence[Grid], *kept: int) -> list[Any]:
    """The grids as parameters of a test: those at the places that are kept for `make test`, the others for test-all."""
    slow = pytest.mark.slow
    return [grid if place in kept else pytest.param(grid, marks=slow) for place, grid in enumerate(grids)]


class Calls(nn.Module):
    """A function as a module, so that one harness serves both."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [t for v in result.values() for t in tensors_of(v)]
    return [t for v in result for t in tensors_of(v)] if isinstance(result, (tuple, list)) else []


def full(tensor: Tensor) -> Tensor:
    """A whole tensor, gathered if it is sharded."""
    return tensor.full() if isinstance(tensor, mural.ShardedTensor) else tensor


def loss_of(result: Any, seed: int = 0) -> Tensor:
    """A random projection of all floating results, so that every output's gradient matters."""
    total: Tensor | None = None
    for tensor in tensors_of(result):
        if not tensor.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(tuple(tensor.shape), generator=generator, dtype=torch.float64)
        weights = weights.to(tensor.device, tensor.dtype)
        term = (tensor * weights).sum()
        total = term if total is None else total + term
    if total is None:
        raise ValueError("no floating result")
    return total


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """The largest difference relative to the largest entry."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros_like(a), (a - b).abs()).max()
    scale = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else torch.ones(())
    return float(gap / scale.clamp(min=1e-3))


def compare(module: nn.Module, inputs: Sequence[Tensor], grid: Grid, needs_grad: bool = True) -> dict[str, float]:
    """Run plain and sharded on this rank; the relative differences of everything by name."""
    module, inputs = module.to(grid.device), [x.to(grid.device) for x in inputs]
    plain, sharded = deepcopy(module), deepcopy(module)
    xs = [x.clone().requires_grad_(needs_grad and x.is_floating_point()) for x in inputs]
    torch.manual_seed(1)
    expected = plain(*xs)
    ys = [grid.shard(x) for x in inputs]
    for y in ys:
        if needs_grad and y.is_floating_point():
            y.requires_grad_()
    got = run_sharded(sharded, inputs, ys, grid)
    found: dict[str, float] = {}
    pairs = list(zip(tensors_of(expected), tensors_of(got), strict=True))
    for i, (a, b) in enumerate(pairs):
        found[f"output {i}"] = difference(full(b), a)
    if any(t.is_floating_point() and t.requires_grad for t in tensors_of(expected)):
        loss = loss_of(got)
        assert type(loss) is Tensor, "a loss is a plain tensor"
        reference = loss_of(expected)
        found["loss"] = difference(loss, reference)
        reference.backward()
        loss.backward()
        mural.reduce_gradients(sharded, grid.mesh())
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if x.requires_grad:
                found[f"input gradient {i}"] = difference(None if y.grad is None else y.grad.full(), x.grad)
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            found[f"gradient of {name}"] = difference(q.grad, p.grad)
    for (name, p), q in zip(plain.named_buffers(), sharded.buffers(), strict=True):
        found[f"buffer {name}"] = difference(q, p)
    return found


def run_sharded(module: nn.Module, inputs: Sequence[Tensor], ys: Sequence[Tensor], grid: Grid) -> Any:
    """The module's result; where halos are to be fused, after a run that teaches what follows what."""
    if FUSED:
        state = deepcopy(module.state_dict())
        again = [grid.shard(x) for x in inputs]
        module(*(a.requires_grad_() if y.requires_grad else a for a, y in zip(again, ys, strict=True)))
        module.load_state_dict(state)
    torch.manual_seed(1)
    return module(*ys)


def holds(
    module: nn.Module | Callable[..., Any],
    inputs: Tensor | Sequence[Tensor],
    grid: Grid,
    tolerance: float = TOLERANCE,
    needs_grad: bool = True,
) -> None:
    """Check the law for one module (or picklable function), on the ranks of the grid."""
    if not isinstance(module, nn.Module):
        module = Calls(module)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for rank, found in enumerate(run_on(grid.world, compare, module, inputs, grid, needs_grad)):
        wrong = {name: value for name, value in found.items() if not value <= tolerance}
        assert not wrong, f"rank {rank} of {grid}: {wrong}"


def image(*shape: int, seed: int = 0) -> Tensor:
    """A random image in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def raises(message: str, kind: type[Exception], function: Callable[..., Any], *args: Any, world: int = 2) -> None:
    """Check that a function raises the same kind of error with this text on every rank."""
    for text in run_on(world, partial(_caught, kind, function), *args):
        assert text is not None, f"no {kind.__name__} with {message!r} was raised"
        assert message in text


def _caught(kind: type[Exception], function: Callable[..., Any], *args: Any) -> str | None:
    try:
        function(*args)
    except kind as error:
        return str(error)
    return None


class Expr(nn.Module):
    """An expression of x and y as a module: picklable, and its text is the test's name."""

    def __init__(self, code: str):
        super().__init__()
        self.code = code

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return eval(self.code, {"x": x, "y": y, **names_for(x)})


def names_for(x: Tensor) -> dict[str, Any]:
    """What expressions speak of, with images on the device of a tensor."""

    def images(*shape: int, seed: int = 0) -> Tensor:
        return image(*shape, seed=seed).to(x.device)

    return {"torch": torch, "F": nn.functional, "mural": mural, "image": images, "np": np}
