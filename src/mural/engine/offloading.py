"""Offload in the steps of a model: each kind of step is noted once, planned, timed, and then runs as planned."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from mural.cost.hardware import KNOWN
from mural.engine.held_model import HeldModel
from mural.engine.memory_room import HOST_SHARE, free_for_each
from mural.engine.offloaded_updates import OffloadedUpdates
from mural.memory.host_memory import HostMemory
from mural.memory.machine_memory import machine_memory
from mural.memory.offload.called_tensors import Calls
from mural.memory.offload.dense_blocks import make_dense
from mural.memory.offload.known_steps import KnownStep, KnownStorages, described
from mural.memory.offload.moment_times import MomentTimes
from mural.memory.offload.moments import Gates, has_storage
from mural.memory.offload.noted_step import NotedStep, Operations
from mural.memory.offload.planned_step import PlannedStep
from mural.memory.offload.step_trace import Kind, StepTrace
from mural.memory.offload.swap_plan import SwapChoice, SwapPlan, is_worth
from mural.memory.offload.swapped_memory import SwappedMemory
from mural.memory.pinned import settled
from mural.plans import bytes_of

LEAST = {"cuda": 2**22, "cpu": 1}
"""Blocks of memory that are smaller stay: a copy takes longer to begin than they take to travel."""
DENSE = {"cuda": 2**25, "cpu": 2**11}
"""Blocks into which smaller tensors are put that leave together: parameters, and numbers of the optimizer."""
MOMENTS = 24
"""About so many modules without large parameters are moments, too."""
MOST_KINDS = 8
"""Of so many kinds of steps the plans are kept, those noted last: images may come in many sizes."""
ATTEMPTS = 3
"""So often a kind of step may run differently from its notes before it is only watched."""


class Offloading:
    """What leaves the device in the steps of a model: `kinds` of memory, for the device to stay within a limit.

    Without a limit, a GPU lets leave what costs no time; a CPU, where nothing is gained, everything.
    """

    def __init__(
        self,
        kinds: Iterable[str],
        modules: Sequence[nn.Module],
        device: torch.device,
        limit: int | None = None,
        gated: bool = True,
        folder: Path | None = None,
        free_host: int | None = None,
    ):
        self.kinds, self.modules, self.device, self.limit = frozenset(kinds), modules, settled(device), limit
        if "parameters" in self.kinds:
            self.kinds |= {"gradients"}
        self.gated = gated
        """Whether steps call the modules themselves; if not, what the optimizer keeps leaves for a whole step."""
        self.host = HOST_SHARE * (machine_memory().free if free_host is None else free_host)
        """Bytes of the host's memory that may be taken."""
        self.memory = SwappedMemory(HostMemory(self.device, folder, self.host))
        self.least = LEAST[self.device.type]
        self.named = [(m, name, p) for m in self._all_modules() for name, p in m.named_parameters(recurse=False)]
        self.dense = DENSE[self.device.type]
        if "parameters" in self.kinds:
            make_dense((p for p in self.parameters() if p.device == self.device), self.dense)
        self.gates = Gates(self._with_moments() if gated else [], "activations" in self.kinds)
        self.known: dict[Any, KnownStep] = {}
        self.known_outside = KnownStorages()
        self.lost: dict[Any, int] = {}
        self.link = KNOWN["h200" if self.device.type == "cuda" else "cpu"].host.bandwidth
        hosted = "optimizer" in self.kinds
        self.updates = OffloadedUpdates(self.parameters, self.device, self.limit, hosted, self.least, self.dense)
        self.plan: SwapPlan | None = None
        """What was planned for the last step; None while it is noted."""
        self.everything = self.device.type != "cuda"
        """Whether, without a limit, all leaves that may."""

    @staticmethod
    def of(held: HeldModel) -> Offloading:
        """What leaves under the plan of a model."""
        limit = bytes_of(held.plan.memory) if held.plan.memory else None
        modules = [held.plain, held.loss_terms.root]
        folder = Path(held.plan.offload_folder) if held.plan.offload_folder else None
        free = free_for_each(held.world_mesh, held.device)
        return Offloading(held.plan.offload, modules, held.device, limit, not held.plan.stream, folder, free)

    def _all_modules(self) -> Iterator[nn.Module]:
        return (module for one in self.modules for module in one.modules())

    def _with_moments(self) -> list[nn.Module]:
        """The modules whose begin is a moment: those with large parameters, and some of the others in between."""
        modules = list({id(m): m for m, _, _ in self.named}.values())
        large = {id(m) for m, _, p in self.named if p.nbytes >= self.least}
        every = -(-len(modules) // MOMENTS)
        return [m for place, m in enumerate(modules) if id(m) in large or place % every == 0]

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once; found anew if a module has others than before."""
        if any(module._parameters.get(name) is not p for module, name, p in self.named):
            self.named = [(m, name, p) for m in self._all_modules() for name, p in m.named_parameters(recurse=False)]
        return list({id(p): p for _, _, p in self.named}.values())

    def outside(self) -> list[tuple[UntypedStorage, Kind]]:
        """The memory that is there before a step and may leave, each block once, in a fixed order."""
        parameters = self.parameters()
        gradients = [p.grad for p in parameters if p.grad is not None and has_storage(p.grad)]
        numbers = self.updates.numbers()
        kinds: tuple[tuple[Sequence[Tensor], Kind], ...]
        kinds = (parameters, "parameters"), (gradients, "gradients"), (numbers, "optimizer")
        places = [tensor.data_ptr() for tensors, _ in kinds for tensor in tensors]
        found = self.known_outside.found(places)
        if found is None:
            found = self._found_outside(kinds)
            self.known_outside = KnownStorages.of(places, found)
        return found

    def _found_outside(self, kinds: Sequence[tuple[Sequence[Tensor], Kind]]) -> list[tuple[UntypedStorage, Kind]]:
        """The storages of tensors of some kinds that may leave."""
        found: dict[int, tuple[UntypedStorage, Kind]] = {}
        for tensors, kind in kinds:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if kind in self.kinds and storage.nbytes() >= self.least and tensor.device == self.device:
                    found.setdefault(storage._cdata, (storage, kind))
        return list(found.values())

    # -- steps ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, *given: Any) -> Generator[None]:
        """A block in which a step runs; `given` tells its kind."""
        outside = self.outside()
        key = (described(given), tuple((s.nbytes(), kind) for s, kind in outside))
        self.memory.host.begin(0)
        self.memory.moved = [0, 0]
        known = self.known.get(key)
        self.updates.running = bool(self.kinds & {"parameters", "optimizer"})
        try:
            if not self.gated:
                yield from self._around(outside)
            elif known is not None and known.timed and not known.plan.absences:
                self.plan = known.plan
                yield
            elif known is None:
                yield from self._note(key, outside)
            else:
                yield from self._run(key, known, outside)
        finally:
            self.updates.running = False
            self.memory.all_here()
            self.memory.forget(s._cdata for s, _ in outside)

    def _around(self, outside: list[tuple[UntypedStorage, Kind]]) -> Generator[None]:
        """A step whose modules are not called: what it does not use leaves first, and comes back after it."""
        leaving = [self.memory.entry(s, lasting=True) for s, kind in outside if kind == "optimizer"]
        self.memory.leave(leaving)
        for one in leaving:
            self.memory.free(one)
        yield

    def _note(self, key: Any, outside: list[tuple[UntypedStorage, Kind]]) -> Generator[None]:
        self.plan = None
        step = NotedStep(self.memory, outside, self.kinds, self.device, self.updates.room, self.least)
        watched = "parameters" in self.kinds or self.limit is not None
        with (
            self.gates.open(step),
            Calls(step) if outside else nullcontext(),
            Operations(step) if watched else nullcontext(),
        ):
            yield
        trace = step.trace()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the next steps need other blocks
        if self.lost.get(key, 0) < ATTEMPTS:
            cuda = self.device.type == "cuda"
            for old in [*self.known][: 1 - MOST_KINDS]:
                del self.known[old]
            calls = frozenset(step.calls)
            self.known[key] = KnownStep(step.moments, step.births, calls, trace, self._planned(trace), not cuda)

    def _run(self, key: Any, known: KnownStep, outside: list[tuple[UntypedStorage, Kind]]) -> Generator[None]:
        times = None if known.timed else MomentTimes(self.device)
        self.plan = known.plan
        step = PlannedStep(self.memory, known.plan, known.moments, known.births, known.calls, outside, times)
        with self.gates.open(step), Calls(step) if step.lasting else nullcontext():
            yield
        step.end()
        if step.lost:
            self.lost[key] = self.lost.get(key, 0) + 1
            del self.known[key]
        elif times is not None:
            known.trace, known.timed = replace(known.trace, seconds=times.seconds()), True
            known.plan = self._planned(known.trace, times.host)

    def _planned(self, trace: StepTrace, host_seconds: float = 0.0) -> SwapPlan:
        host = self.host if self.memory.host.folder is None else inf
        choice = SwapChoice(trace, self.kinds, self.link, self.least, host)
        limit = self.updates.room
        if limit is not None:
            return choice.eased(limit)
        if self.everything:
            return choice.everything()
        found = choice.free()
        return found if is_worth(found, trace, host_seconds) else choice.planned(())

    def report(self) -> dict[str, Any]:
        """What was planned for the last step, and what moved."""
        moved = {"to_host": self.memory.moved[0], "from_host": self.memory.moved[1]}
        if self.plan is None:
            return {"noted": True, **moved}
        return {
            "noted": False, "peak": self.plan.peak, "seconds": self.plan.seconds, "host": self.plan.host, **moved
        }  # fmt: skip
