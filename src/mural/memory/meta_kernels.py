"""The memory of a GPU's kernels, counted on tensors without memory.

torch's kernels for tensors without memory give the shapes of results; what a GPU does differently is here: the memory
format of convolutions, copies that they make of what is not dense, kernels of norms, and sums of gradients in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import order_of
from mural.cost.memory_tally import ROUNDED, Tally
from mural.graph.meta_results import result_of

aten: Any = torch.ops.aten


def format_of(*tensors: Tensor) -> torch.memory_format:
    """Channels last if any of them is."""
    return next((form for t in tensors if (form := order_of(t)) != torch.contiguous_format), torch.contiguous_format)


class GpuTally(Tally):
    """Counts memory as the calls would take it on a GPU."""

    def __init__(self) -> None:
        super().__init__(ROUNDED["cuda"])

    def hold(self, size: int) -> None:
        """Count bytes that are there from now on."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def touch(self, size: int) -> None:
        """Count bytes that a kernel takes while it runs."""
        self.peak = max(self.peak, self.live + size)

    def counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives, once its memory is counted as its kernel takes it."""
        if func is aten.add.Tensor and summed_by_engine():
            return self.summed(result_of(func, args, kwargs))
        kernel = KERNELS.get(func)
        if kernel is None:
            return super().counted(func, args, kwargs)
        result = kernel(self, *args, **kwargs)
        for tensor in result if isinstance(result, tuple) else (result,):
            if tensor is not None:
                self.enter(tensor)
        return result

    def summed(self, result: Tensor) -> Tensor:
        """A sum of two gradients, which a GPU adds in place: both of them go as it is made."""
        before = self.peak
        self.enter(result)
        self.peak = before
        return result

    def dense(self, tensor: Tensor, form: torch.memory_format) -> int:
        """The bytes of the copy that a kernel makes of a tensor which is not dense in a memory format."""
        return 0 if tensor.is_contiguous(memory_format=form) else tensor.numel() * tensor.element_size()


def summed_by_engine() -> bool:
    """Whether autograd's engine adds up gradients right now: it runs, but none of its nodes."""
    engine: Any = torch._C
    return engine._current_graph_task_id() != -1 and engine._current_autograd_node() is None


def convolution(tally: GpuTally, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    """A convolution."""
    form = format_of(x, weight)
    made = torch.empty_like(result_of(aten.convolution.default, (x, weight, bias, *others), {}), memory_format=form)
    tally.touch(made.numel() * made.element_size() + tally.dense(x, form) + tally.dense(weight, form))
    return made


def convolution_backward(
    tally: GpuTally, grad: Tensor, x: Tensor, weight: Tensor, bias: Sequence[int] | None, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of a convolution, one after the other."""
    form = format_of(x, weight)
    of_x = torch.empty_like(x, memory_format=form) if mask[0] else None
    of_weight = torch.empty_like(weight, memory_format=form) if mask[1] else None
    of_bias = weight.new_empty(weight.shape[1] * groups if transposed else weight.shape[0]) if mask[2] else None
    made = sum(t.numel() * t.element_size() for t in (of_x, of_weight, of_bias) if t is not None)
    tally.touch(made + tally.dense(grad, form) + tally.dense(x, form))
    return of_x, of_weight, of_bias


def wide(x: Tensor) -> torch.dtype:
    """The type of a norm's statistics."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def update_stats(tally: GpuTally, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Means and variances of channels."""
    return tuple(x.new_empty(x.shape[1], dtype=wide(x)) for _ in range(2))  # type: ignore[return-value]


def backward_reduce(tally: GpuTally, grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """The four sums over channels that the backward of a norm needs."""
    return tuple(x.new_empty(x.shape[1], dtype=wide(x)) for _ in range(4))


def elementwise(tally: GpuTally, x: Tensor, *others: Any) -> Tensor:
    """Channels scaled and shifted."""
    return torch.empty_like(x)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.batch_norm_update_stats.default: update_stats,
    aten.batch_norm_backward_reduce.default: backward_reduce,
    aten.batch_norm_elemt.default: elementwise,
}
