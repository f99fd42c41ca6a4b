"""Moments: the points of a step at which memory may leave and come back.

Autograd saves a tensor in forward, and takes it in backward; a module with parameters begins, forward or backward.
These are gates: nothing else reaches what autograd alone holds, and parameters are used after their module has begun.
So memory that is away is back when its gate opens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mural.comm.exchange import gives_back
from mural.memory.offload.swapped_memory import Swapped
from mural.shard import ShardedTensor
from mural.shard.compiler import HIDDEN

UNWATCHED = torch._C.DisableTorchFunction  # type: ignore[attr-defined]
"""A block in which what is done to tensors is none of the model's calls, so that nobody who watches those sees it."""
unwatched: Callable[[], bool] = torch._C._is_torch_function_all_disabled  # type: ignore[attr-defined]
"""Whether the code that runs is in such a block."""
HIDDEN.append("mural.memory")  # its hooks are called in the middle of compiled modules
BEGIN, TAKEN, FIRST_MODULE = -1, -2, -3
"""Moments as numbers: the bytes of what is saved; or these, and smaller ones for further modules: an odd number for the
begin of forward, the even one below it for that of backward."""


def gated_by(module: nn.Module, moment: int) -> Iterator[Tensor]:
    """What may be away until a module begins: its parameters; before backward, gradients too that a step adds to."""
    for p in module._parameters.values():
        if p is not None:
            yield p
            if p.is_leaf and p.grad is not None and is_backward(moment) and has_storage(p.grad):
                yield p.grad


def is_backward(moment: int) -> bool:
    """Whether a moment of a module is the begin of its backward."""
    return moment % 2 == 0


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own that could leave: not one that wraps others, and no sparse one."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def made(x: ShardedTensor) -> Tensor:
    """The tensor that the last operation made: the extended piece, of which the owned one may be cut out later."""
    return x.local if x.margin is None else x.margin.extended


class Saved:
    """A tensor that autograd saved, and its memory, which may be away."""

    def __init__(self, tensor: Tensor, memory: Swapped):
        self.tensor, self.memory, self.version = tensor, memory, tensor._version
        memory.holders += 1

    def __del__(self) -> None:
        self.memory.holders -= 1

    def taken(self) -> Tensor:
        """The tensor, as it was saved; another one, so that its memory is in use as long as that is."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs was modified by an inplace "
                f"operation: it was saved at version {self.version} and is at {self.tensor._version}. Use an operation "
                f"that is not in place; without offload, torch raises here, too"
            )
        return self.tensor.detach()


class StepMoments(Protocol):
    """What is done at the moments of a step."""

    def save(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor."""
        ...

    def take(self, kept: Any) -> Tensor:
        """The tensor of which autograd kept that."""
        ...

    def enter(self, number: int, module: nn.Module) -> None:
        """A module with parameters begins, forward or backward."""
        ...


class Gates:
    """The gates of a model: they tell a step of its moments, while there is one.

    `modules` have parameters that may leave; without `saving`, tensors that autograd saves are left alone.
    """

    def __init__(self, modules: Sequence[nn.Module], saving: bool):
        self.step: StepMoments | None = None
        self.saving = saving
        self.numbers = {module: FIRST_MODULE - 2 * place for place, module in enumerate(modules)}
        for module in modules:
            module.register_forward_pre_hook(self._forward)
            module.register_forward_hook(self._await_backward)

    def _forward(self, module: nn.Module, _: Any) -> None:
        if self.step is not None:
            with UNWATCHED():
                self.step.enter(self.numbers[module], module)

    def _await_backward(self, module: nn.Module, _: Any, output: Any) -> None:
        """Have the first operation of a module's backward open its gate."""
        if self.step is None:
            return
        for leaf in (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output):
            tensor = made(leaf) if isinstance(leaf, ShardedTensor) else leaf
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._backward, module))

    def _backward(self, module: nn.Module, _: Any) -> None:
        if self.step is not None:
            with UNWATCHED():
                self.step.enter(self.numbers[module] - 1, module)

    @contextmanager
    def open(self, step: StepMoments) -> Generator[None]:
        """A block whose moments a step is told of."""
        self.step = step
        try:
            with keeping(step) if self.saving else nullcontext():
                yield
        finally:
            self.step = None


def is_gate(hook: Callable[..., Any]) -> bool:
    """Whether a hook of a module is one of offload's."""
    return isinstance(getattr(hook, "__self__", None), Gates)


def keeping(step: StepMoments) -> torch.autograd.graph.saved_tensors_hooks:
    """A block in which a step is told what autograd keeps. It keeps just that: nothing is computed again from it."""

    def save(tensor: Tensor) -> Any:
        with UNWATCHED():
            return step.save(tensor)

    def take(kept: Any) -> Tensor:
        with UNWATCHED():
            return step.take(kept)

    return torch.autograd.graph.saved_tensors_hooks(gives_back(save), take)
