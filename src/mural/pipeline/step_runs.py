"""The runs of one step on a rank: each begins with what the model held before the step, and all leave the same.

A batch in micro-batches, two stages on one rank, a stage that is computed again: the forward of a module runs several
times where one device runs it once. What it leaves in attributes, buffers and Python's random states counts once, or
the plan is refused by the attribute's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from mural.errors import PlanError
from mural.graph.commons import Commons, Name
from mural.graph.held_state import HeldState
from mural.graph.kept_values import same
from mural.graph.script import Script
from mural.graph.sites import ModuleCall
from mural.graph.without_memory import Absent


class Runs:
    """The runs of one step. `several` says that some module may run more than once; `passed` are buffers of norms that
    look at each micro-batch alone, and move with each.
    """

    def __init__(self, modules: Mapping[str, nn.Module], script: Script | None, several: bool, passed: frozenset[int]):
        self.modules = modules
        self.opened = {path: m for path, m in modules.items() if script is not None and path in script.opened}
        self.commons = Commons.of(modules.values())
        self.light = HeldState.by(self.opened, values=False, commons=self.commons)
        self.held = HeldState.by(modules, passed, commons=self.commons) if several else None
        apart = () if script is None else within(modules, script.called_apart)
        self.apart = HeldState.by({path: modules[path] for path in apart}, commons=self.commons) if apart else None
        self.paths = {} if script is None or self.held is None else paths_of(script, modules)
        self.ends: dict[int, dict[Name, Any]] = {}
        self.shared: dict[int, dict[Name, Any]] = {}
        """What a run of each stage left in what modules have in common."""

    @contextmanager
    def run(self, stage: int) -> Generator[None]:
        """One run of a stage."""
        only = self.paths.get(stage)
        if self.held is not None:
            self.held.put_back(only)
        yield
        shared = self.commons.changes()
        check_left(self.shared.setdefault(stage, shared), shared)
        if self.held is not None:
            changes = self.held.changes(only)
            check_left(self.ends.setdefault(stage, changes), changes)

    @contextmanager
    def again(self, stage: int) -> Generator[None]:
        """A run that is computed again in backward: it finds what its first one found, and leaves nothing."""
        only = self.paths.get(stage)
        now = HeldState.by({path: m for path, m in self.modules.items() if only is None or path in only})
        if self.held is not None:
            self.held.put_back(only)
        try:
            yield
        finally:
            now.put_back()

    @contextmanager
    def backward(self, stage: int) -> Generator[None]:
        """A backward. A checkpoint may run modules again in it: they leave what the forwards left, or are refused."""
        yield
        left = self.ends.get(stage)
        if not left or self.held is None:
            return
        name = differing(left, self.held.changes(self.paths.get(stage)))
        if name is not None:
            raise PlanError(
                f"{name} changes again where a checkpoint computes forward again, which happens once for each "
                f"micro-batch, and once for a batch: leave what changes it out of the checkpoint, or use "
                f"microbatches = 1"
            )

    def end(self) -> int:
        """A number for what runs left in what modules have in common, 0 for nothing; it must be the same on all ranks.

        Raises where a module that several stages call has changed: each stage has its own.
        """
        self._clear()
        if self.apart is not None:
            for path, attribute in self.apart.changes():
                raise PlanError(
                    f"{attribute!r} of module {path!r} changes in forward, but several stages call this module, "
                    f"and each would have its own: move the cut so that one stage has all of its calls"
                )
        found = {said(changes) for changes in self.shared.values()}
        if len(found) > 1:
            raise shared_apart(name for changes in self.shared.values() for name in changes)
        (text,) = found or {""}
        return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "big") if text else 0

    def undo(self) -> None:
        """Give the modules what they held before the step, which failed."""
        for held in (self.light, self.held, self.apart):
            if held is not None:
                held.put_back()

    def _clear(self) -> None:
        """Registered tensors that another stage has replaced stay what they were here."""
        for path, module in self.opened.items():
            for name, value in module._buffers.items():
                if isinstance(value, Absent):
                    module._buffers[name] = self.light.buffers[path][name].value


def said(changes: Mapping[Name, Any]) -> str:
    """What a run left, as a text; "" for nothing."""
    with np.printoptions(threshold=1000000):
        return repr(sorted(changes.items(), key=lambda item: item[0])) if changes else ""


def differing(before: Mapping[Name, Any], after: Mapping[Name, Any]) -> str | None:
    """The first name, in words, of what two runs left differently."""
    names = (n for n in {**before, **after} if n not in before or n not in after or not same(before[n], after[n]))
    return next((".".join(filter(None, name)) for name in names), None)


def check_left(before: Mapping[Name, Any], after: Mapping[Name, Any]) -> None:
    """Raise unless two runs left the same."""
    name = differing(before, after)
    if name is not None:
        raise PlanError(
            f"{name} differs after each micro-batch, where one forward pass of the whole batch leaves one value: it "
            f"depends on the images. Use microbatches = 1, or do not keep it on the module"
        )


def shared_apart(names: Iterable[Name]) -> PlanError:
    """The error for what modules have in common and some stages change."""
    told = ", ".join(sorted({".".join(filter(None, name)) for name in names})) or "what modules have in common"
    return PlanError(
        f"forward changes or draws from {told} in some stages and not in others, or ranks began with different states: "
        f"seed random and numpy.random equally on all ranks, keep variables on modules, do it in the model's forward, "
        f"or use one stage"
    )


def within(modules: Mapping[str, nn.Module], roots: frozenset[str]) -> list[str]:
    """The paths of some modules and all in them."""
    found: dict[str, bool] = {"": False}
    if not roots:
        return []
    for path in modules:  # a module comes before those in it
        found[path] = path in roots or found.get(path.rpartition(".")[0], False)
    return [path for path, inside in found.items() if inside]


def paths_of(script: Script, modules: Mapping[str, nn.Module]) -> dict[int, frozenset[str]]:
    """For each stage the modules whose forward its runs may reach: open ones, and its own closed ones."""
    roots: dict[int, set[str]] = {}
    for item in script.items:
        if isinstance(item.run, ModuleCall):
            roots.setdefault(item.stage, set()).add(item.run.module)
    stages = range(len(script.stretches))
    return {s: script.opened | frozenset(within(modules, frozenset(roots.get(s, ())))) for s in stages}


def moving(modules: Mapping[str, nn.Module]) -> frozenset[int]:
    """The running statistics of batch norms in training, by `id`."""
    norms = (m for m in modules.values() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training)
    return frozenset(id(b) for m in norms for b in m._buffers.values() if isinstance(b, Tensor))
