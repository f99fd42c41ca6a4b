"""A rehearsal: a step on tensors without memory, with the memory that a GPU would take and the time that it would need.

It is the step itself that is noted, forward and backward, with blocks that are computed again; so it has the moments
that a run will have, and the same choice can be made of it (`SwapChoice`), before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from mural.cost.hardware import Hardware
from mural.cost.kernel_prices import kernel_seconds
from mural.cost.rates import Rates
from mural.engine.alignment import target_dims
from mural.engine.block_call import BlockCall
from mural.engine.recompute import chosen
from mural.engine.tile_inputs import CHANNELS_LAST, memory_format
from mural.memory.host_memory import HostMemory
from mural.memory.meta_kernels import GpuTally
from mural.memory.offload.moments import Gates
from mural.memory.offload.noted_step import NotedStep
from mural.memory.offload.step_trace import Kind, StepTrace
from mural.memory.offload.swap_plan import HOST_MOMENT
from mural.memory.offload.swapped_memory import SwappedMemory
from mural.memory.offload.used_tensors import SHAPES, tensors_in
from mural.memory.stream_memory import without_memory
from mural.ranks import Mesh
from mural.shard.meta_autocast import meta_autocast
from mural.shard.place import place_on

META = torch.device("meta")
NO_KERNEL = ("empty", "empty_strided", "empty_like", "_unsafe_view")
"""Operations that only take memory, or look at it in another shape."""
HOST_FORWARD, HOST_AGAIN, HOST_BACKWARD = 1.2e-4, 2e-4, 2e-5
"""Seconds that the host takes for an operation: called by the model, called again by it, and by autograd; on the host
of an H200."""


class PricedTally(GpuTally):
    """Counts memory as a GPU would take it, and the seconds in which its kernels are done.

    The host calls one operation after the other; a kernel begins when it was called, and the one before is done.
    """

    def __init__(self, rates: Rates):
        super().__init__()
        self.rates = rates
        self.clock = self.host = self.watched_clock = self.watched_host = 0.0
        """When the last kernel is done, and when it was called; and the same for a step whose moments are watched."""
        self.again = False
        """Whether a block is computed again."""
        self.stops: list[float] = []
        self.watched_stops: list[float] = []

    def counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives, once its memory is counted and its kernel has its time."""
        result = super().counted(func, args, kwargs)
        name = kernel_of(func)
        if name is not None:
            read, written = list(tensors_in((*args, *kwargs.values()))), list(tensors_in((result,)))
            products_of = flop_registry.get(func._overloadpacket)
            products = 0 if products_of is None else products_of(*args, **kwargs, out_val=result)
            self._run(kernel_seconds(name, read, written, products, self.rates))
        return result

    def _run(self, kernel: float) -> None:
        """Count an operation whose kernel takes so long."""
        each = self._host()
        self.host, self.watched_host = self.host + each, self.watched_host + each
        self.clock = max(self.clock, self.host) + kernel
        self.watched_clock = max(self.watched_clock, self.watched_host) + kernel

    def _host(self) -> float:
        """Seconds that the host takes for an operation now."""
        engine: Any = torch._C
        if self.again:
            return HOST_AGAIN
        return HOST_FORWARD if engine._current_graph_task_id() == -1 else HOST_BACKWARD

    @contextmanager
    def computing_again(self) -> Generator[None]:
        """A block of code in which a block of the model is computed again."""
        self.again = True
        try:
            yield
        finally:
            self.again = False

    # -- as a gauge ----------------------------------------------------------------------------------------------------

    def most(self) -> int:
        """The most bytes since the last moment."""
        return self.peak

    def now(self) -> int:
        """The bytes now."""
        return self.live

    def stop(self) -> None:
        """A moment begins."""
        self.watched_host += HOST_MOMENT
        self.stops.append(self.clock)
        self.watched_stops.append(self.watched_clock)

    def start(self) -> None:
        """It is over."""
        self.forget()

    def seconds(self) -> tuple[float, ...]:
        """The seconds after each moment, up to the next one."""
        return tuple(b - a for a, b in pairwise(self.stops))

    def watched(self) -> tuple[float, ...]:
        """The same in a step from which something leaves: the host looks at every moment."""
        return tuple(b - a for a, b in pairwise(self.watched_stops))


@cache
def kernel_of(func: Any) -> str | None:
    """The name of the kernel that an operation runs; None if it returns a view, or only looks at shapes.

    >>> kernel_of(torch.ops.aten.relu.default), kernel_of(torch.ops.aten.view.default)
    ('relu', None)
    """
    schema = func._schema
    views = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    name = schema.name.split("::")[-1]
    return None if views or name in SHAPES or name in NO_KERNEL else name


def rehearsed(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], given: Sequence[tuple[Sequence[int], torch.dtype]], *,
    hardware: Hardware, recompute: str | tuple[str, ...] = (), lower: torch.dtype | None = None, numbers: float = 0.0,
    least: int = 2**22,
) -> StepTrace:  # fmt: skip
    """The trace of a step for an image and a target of these shapes and types.

    Under autocast, `lower` is its type; the optimizer keeps `numbers` for each of a parameter's.
    """
    copy = model_without_memory(model)
    tally = PricedTally(hardware.rates)
    for block in chosen(copy, recompute) if recompute else ():
        computed_again(block, lower, tally)
    mesh = Mesh.of_one()
    image, target = (torch.empty(tuple(shape), dtype=dtype, device=META) for shape, dtype in given)
    form = memory_format(copy)
    image = image.to(memory_format=form) if image.ndim in CHANNELS_LAST else image
    state = [*copy.parameters(), *copy.buffers()]
    for tensor in (*state, image, target):
        tally.enter(tensor)
    tally.hold(hardware.rates.workspace + bytes_kept(copy, numbers))
    known: list[tuple[torch.UntypedStorage, Kind]] = [(tensor.untyped_storage(), "fixed") for tensor in state]
    step = NotedStep(SwappedMemory(HostMemory(META)), known, ["activations"], META, None, least, tally)
    generator = torch.get_rng_state()
    try:
        with tally, Gates([], True).open(step):
            with meta_autocast(lower):
                dims = target_dims(tuple(target.shape), tuple(image.shape), 0)
                found = loss(copy(place_on(image, mesh)), place_on(target, mesh, dims=dims))
            found.backward()
    finally:
        torch.set_rng_state(generator)
    return replace(step.trace(), watched=tally.watched())


def bytes_kept(model: nn.Module, numbers: float) -> int:
    """The bytes of what an optimizer keeps, so many numbers for each of a parameter that is trained.

    >>> head = nn.Linear(4, 2, bias=False)
    >>> bytes_kept(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), head), 2)
    64
    """
    return int(numbers * sum(p.nbytes for p in model.parameters() if p.requires_grad))


def model_without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model on tensors without memory, in their memory formats."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = without_memory(tensor)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return deepcopy(model, memo)


def computed_again(block: nn.Module, lower: torch.dtype | None, tally: PricedTally) -> None:
    """Let a block be computed again in backward, under the same autocast."""
    options: dict[str, Any] = {"preserve_rng_state": False}
    options["context_fn"] = lambda: (nullcontext(), computing_again(lower, tally))
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return BlockCall(plain, args, kwargs, leaving=True).forgetful(**options)

    block.forward = forward


@contextmanager
def computing_again(lower: torch.dtype | None, tally: PricedTally) -> Generator[None]:
    """What holds while a block is computed again."""
    with meta_autocast(lower), tally.computing_again():
        yield
