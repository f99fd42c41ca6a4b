"""Calls of a step that reach memory which may be away: those that the noted step did not make end the plan.

A parameter has the begin of its module as its gate. A step may reach it by another way now and then, as by writing its
norm into a log in every hundredth step: no gate opens there, and the plan knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mural.memory.offload.moments import UNWATCHED, has_storage
from mural.memory.offload.used_tensors import tensors_in
from mural.shard.table import writes

ATTRIBUTES = (
    "shape", "ndim", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "output_nr", "names",
    "itemsize", "nbytes", "retains_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
    "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "retain_grad", "__len__", "__hash__",
)  # fmt: skip
LOOKS = frozenset([
    *(getattr(torch.Tensor, name).__get__ for name in ATTRIBUTES if hasattr(torch.Tensor, name)),
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in METHODS),
])  # fmt: skip
"""Calls that read nothing of a tensor's memory."""
_builtin: Any = torch._C  # torch's stubs leave its submodules out
FUNCTORCH = _builtin._functorch
BACKWARDS = frozenset([torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad])
ENGINE, RUNS = torch.autograd, "_engine_run_backward"
"""What these call to run backward."""


class CalledStep(Protocol):
    """A step that is told of calls."""

    def called(self, tensor: Tensor, writes: bool) -> None:
        """A call of torch gets a tensor; by its name it `writes` to one, or does not."""
        ...


class Calls(TorchFunctionMode):
    """A block in which a step is told which tensors calls get: those that Python makes, in forward and in hooks."""

    def __init__(self, step: CalledStep):
        super().__init__()
        self.step = step

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What a call gives."""
        if func not in LOOKS:
            with UNWATCHED():
                changes = writes(getattr(func, "__name__", "")) or bool(kwargs and kwargs.get("out") is not None)
                for tensor in given_to(args, kwargs):
                    self.step.called(tensor, changes)
        with self._in_backward() if func in BACKWARDS else nullcontext():
            return func(*args, **(kwargs or {}))

    @contextmanager
    def _in_backward(self) -> Generator[None]:
        """A block in which this one goes on while the engine runs: torch ends it for a call, and hooks make calls."""
        runs = getattr(ENGINE, RUNS)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return runs(*args, **kwargs)

        setattr(ENGINE, RUNS, watched)
        try:
            yield
        finally:
            setattr(ENGINE, RUNS, runs)


def given_to(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Iterator[Tensor]:
    """The tensors with memory of their own among the arguments of a call."""
    return filter(has_storage, map(unwrapped, tensors_in((*args, *kwargs.values()) if kwargs else args)))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that `torch.func.vmap`, `grad` and others wrapped, as often as they did."""
    while FUNCTORCH.is_functorch_wrapped_tensor(tensor):
        tensor = FUNCTORCH.get_unwrapped(tensor)
    return tensor
