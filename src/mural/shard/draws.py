"""Random numbers that a model draws as plain tensors, in micro-batches: the rows of what the whole batch would draw.

torchvision's stochastic depth makes its mask so: `torch.empty([x.shape[0], 1, 1, 1]).bernoulli_(p)`. Every micro-batch
begins with the random state of the batch, so each draws for all images and takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mural.errors import PlanError
from mural.shard.rows import current_rows
from mural.shard.table import name_of
from mural.shard.tensor import sharded_in

Shape = tuple[int, ...]
Draws = Mapping[tuple[str, Shape], Shape]
"""For calls that draw, by name and shape in the micro-batch, the shape in the whole batch."""
FILLS = frozenset([
    "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
])  # fmt: skip
MAKES: Mapping[str, str] = {
    "rand": "uniform_",
    "randn": "normal_",
    "randint": "random_",
    "rand_like": "uniform_",
    "randn_like": "normal_",
}
"""The calls that make a tensor of random numbers, and those that fill one with the same."""


class WholeDraws(TorchFunctionMode):
    """While it is active, draws of these shapes are rows of the whole batch's."""

    def __init__(self, draws: Draws):
        super().__init__()
        self.draws = draws

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        if (name not in FILLS and name not in MAKES) or sharded_in((args, kwargs)):
            return func(*args, **kwargs)
        if name in FILLS:
            shape = self._whole(name, args[0], kwargs)
            return func(*args, **kwargs) if shape is None else self._filled(func, shape, args, kwargs)
        device = torch.device("cuda") if torch.cuda.is_available() else None
        before = torch.get_rng_state(), torch.cuda.get_rng_state() if device else None
        made: Tensor = func(*args, **kwargs)
        shape = self._whole(name, made, kwargs)
        if shape is None:
            return made
        torch.set_rng_state(before[0])
        if before[1] is not None:
            torch.cuda.set_rng_state(before[1])
        bounds = [a for a in args if type(a) is int] if name == "randint" else []
        bounds = [0, *bounds] if len(bounds) == 1 else bounds
        with torch.no_grad():
            self._filled(getattr(Tensor, MAKES[name]), shape, (made, *bounds), {})
        return made

    def _whole(self, name: str, tensor: Tensor, kwargs: Mapping[str, Any]) -> Shape | None:
        """The shape of a draw in the whole batch; None where it is no other."""
        shape = self.draws.get((name, tuple(tensor.shape)))
        if shape is not None and kwargs.get("generator") is not None:
            raise PlanError(
                f"{name} draws from a generator of its own, which would give each micro-batch other numbers than the "
                f"batch: use torch's default generator, or microbatches = 1"
            )
        return shape

    def _filled(self, fill: Callable[..., Any], shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        rows, target = current_rows(), args[0]
        whole = fill(target.detach().new_empty(shape), *args[1:], **kwargs)
        if rows is None:
            raise PlanError("draws of a micro-batch need to know its rows")
        each = shape[0] // rows.total
        target.copy_(whole[rows.start * each : rows.stop * each])
        return target


@contextmanager
def whole_draws(draws: Draws) -> Generator[None]:
    """In this block, draws are the rows of the whole batch's."""
    if not draws:
        yield
        return
    _active.append(draws)
    try:
        with WholeDraws(draws):
            yield
    finally:
        _active.pop()


_active: list[Draws] = [{}]


def active_draws() -> Draws:
    """The draws that hold now, for what is computed again later."""
    return _active[-1]
