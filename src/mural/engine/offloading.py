"""Offload in the steps of a model: each kind of step is noted once, planned, timed, and runs as planned from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from mural.cost.hardware import KNOWN
from mural.engine.held_model import HeldModel
from mural.memory.host_memory import HostMemory
from mural.memory.machine_memory import machine_memory
from mural.memory.offload.noted_step import NotedStep, Operations
from mural.memory.offload.moment_times import MomentTimes
from mural.memory.offload.moments import Gates
from mural.memory.offload.planned_step import PlannedStep
from mural.memory.offload.step_trace import Kind, StepTrace
from mural.memory.offload.swap_plan import SwapChoice, SwapPlan
from mural.memory.offload.swapped_memory import SwappedMemory
from mural.memory.pinned import settled
from mural.plans import bytes_of

LEAST = {"cuda": 2**20, "cpu": 1}
"""Blocks of memory that are smaller stay: a copy takes longer to begin than they take to travel."""
TENSORS = 0.93
"""The part of a GPU's memory that tensors may take: torch's allocator reserves more than they do."""
HOST_SHARE = 0.8
"""The part of the host's free memory that may be taken."""
ATTEMPTS = 3
"""So often a kind of step may run differently from its notes before it is only watched."""


@dataclass
class KnownStep:
    """A kind of step: its moments, the memory that is saved at some, its trace and its plan."""

    moments: list[int]
    births: dict[int, int]
    trace: StepTrace
    plan: SwapPlan
    timed: bool


class Offloading:
    """What leaves the device in the steps of a model: `kinds` of memory, for the device to stay within a limit.

    Without a limit, a GPU lets leave what costs no time; a CPU, where nothing is gained, everything.
    """

    def __init__(self, kinds: Iterable[str], modules: Sequence[nn.Module], device: torch.device, limit: int | None):
        self.kinds, self.modules, self.device, self.limit = frozenset(kinds), modules, settled(device), limit
        self.memory = SwappedMemory(HostMemory(self.device))
        self.least = LEAST[self.device.type]
        self.gates = Gates([m for m in self._all_modules() if self._leaves(m)])
        self.known: dict[Any, KnownStep] = {}
        self.lost: dict[Any, int] = {}
        self.link = KNOWN["h200" if self.device.type == "cuda" else "cpu"].host.bandwidth
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.plan: SwapPlan | None = None
        """What was planned for the last step; None while it is noted."""
        if "optimizer" in self.kinds:
            register_optimizer_step_post_hook(told(self))

    @staticmethod
    def of(held: HeldModel) -> Offloading:
        """What leaves under the plan of a model."""
        limit = bytes_of(held.plan.memory) if held.plan.memory else None
        return Offloading(held.plan.offload, [held.plain], held.device, limit)

    def _all_modules(self) -> Iterator[nn.Module]:
        return (module for one in self.modules for module in one.modules())

    def _leaves(self, module: nn.Module) -> bool:
        """Whether parameters of a module may leave."""
        return "parameters" in self.kinds and any(p.nbytes >= self.least for p in module.parameters(recurse=False))

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once."""
        return list({id(p): p for module in self.modules for p in module.parameters()}.values())

    def outside(self) -> list[tuple[UntypedStorage, Kind]]:
        """The memory that is there before a step and may leave, each block once, in a fixed order."""
        found: dict[int, tuple[UntypedStorage, Kind]] = {}
        parameters = self.parameters()
        states = [state[p] for state in (o.state for o in self.optimizers) for p in parameters if p in state]
        numbers = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        for tensors, kind in ((parameters, "parameters"), (numbers, "optimizer")):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if kind in self.kinds and storage.nbytes() >= self.least and tensor.device == self.device:
                    found.setdefault(storage._cdata, (storage, kind))
        return list(found.values())

    @contextmanager
    def step(self, *given: Any) -> Generator[None]:
        """A block in which a step runs; `given` tells its kind."""
        outside = self.outside()
        key = (described(given), tuple((s.nbytes(), kind) for s, kind in outside))
        self.memory.host.begin(0)
        self.memory.moved = [0, 0]
        known = self.known.get(key)
        try:
            if known is None:
                yield from self._note(key, outside)
            else:
                yield from self._run(key, known, outside)
        finally:
            self.memory.all_here()
            self.memory.forget(s._cdata for s, _ in outside)

    def _note(self, key: Any, outside: list[tuple[UntypedStorage, Kind]]) -> Generator[None]:
        self.plan = None
        step = NotedStep(self.memory, outside, self.kinds, self.device, self._tensors(), self.least)
        with self.gates.open(step), Operations(step) if "parameters" in self.kinds else nullcontext():
            yield
        trace = step.trace()
        if self.lost.get(key, 0) < ATTEMPTS:
            cuda = self.device.type == "cuda"
            self.known[key] = KnownStep(step.moments, step.births, trace, self._planned(trace), not cuda)

    def _run(self, key: Any, known: KnownStep, outside: list[tuple[UntypedStorage, Kind]]) -> Generator[None]:
        times = None if known.timed else MomentTimes(self.device)
        self.plan = known.plan
        step = PlannedStep(self.memory, known.plan, known.moments, known.births, (s for s, _ in outside), times)
        with self.gates.open(step):
            yield
        step.end()
        if step.lost:
            self.lost[key] = self.lost.get(key, 0) + 1
            del self.known[key]
        elif times is not None:
            known.trace, known.timed = replace(known.trace, seconds=times.seconds()), True
            known.plan = self._planned(known.trace)

    def _planned(self, trace: StepTrace) -> SwapPlan:
        host = machine_memory().free * HOST_SHARE
        choice = SwapChoice(trace, self.kinds, self.link, self.least, host)
        limit = self._tensors()
        if limit is not None:
            return choice.within(limit)
        return choice.free() if self.device.type == "cuda" else choice.everything()

    def _tensors(self) -> int | None:
        """The bytes that tensors may take."""
        return None if self.limit is None else int(TENSORS * self.limit)

    def report(self) -> dict[str, Any]:
        """What was planned for the last step, and what moved."""
        moved = {"to_host": self.memory.moved[0], "from_host": self.memory.moved[1]}
        if self.plan is None:
            return {"noted": True, **moved}
        return {
            "noted": False, "peak": self.plan.peak, "seconds": self.plan.seconds, "host": self.plan.host, **moved
        }  # fmt: skip


def told(offloading: Offloading) -> Callable[..., None]:
    """What tells of optimizers of a model's parameters, as long as there is the model."""
    held = weakref.ref(offloading)

    def updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        here = held()
        if here is not None and optimizer not in here.optimizers:
            mine = {id(p) for p in here.parameters()}
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                here.optimizers.add(optimizer)

    return updated


def described(given: Any) -> tuple[Any, ...]:
    """What tells inputs of different shapes apart."""
    return tuple(
        (tuple(leaf.shape), getattr(leaf, "dtype", None)) if hasattr(leaf, "shape") else str(leaf)
        for leaf in pytree.tree_leaves(given)
    )
