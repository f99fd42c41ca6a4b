"""The parameters of a block that is computed again: what they were in its forward, whoever writes to them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mural.engine.block_inputs import FirstWrites, memory_of, version_of
from mural.errors import PlanError
from mural.graph.commons import Commons
from mural.graph.held_state import HeldState
from mural.memory.offload.noted_step import Operations
from mural.shard.ops.norm.rank_statistics import buffers_put_back


@dataclass
class HeldParameters:
    """The parameters that modules have at one time; under `torch.func.functional_call`, what stands in for them."""

    modules: Mapping[str, nn.Module]
    tables: list[dict[str, Any]]
    left: list[tuple[str, Tensor, int]] = field(default_factory=list[tuple[str, Tensor, int]])
    """Those that are after the forward what they were before, by name, with how often they had been written to."""
    moved: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    """Those that are not, with copies of what they were."""
    written: frozenset[str] = frozenset()
    """The names of those to which the forward wrote, if only what they were."""

    @classmethod
    def by(cls, modules: Mapping[str, nn.Module]) -> HeldParameters:
        """What modules have now, by path."""
        return cls(modules, [dict(module._parameters) for module in modules.values()])

    def named(self) -> dict[str, Tensor]:
        """The parameters by name."""
        pairs = zip(self.modules, self.tables, strict=True)
        return {f"{path}.{n}".lstrip("."): p for path, table in pairs for n, p in table.items() if p is not None}

    def memory(self) -> set[int | None]:
        """The memory of the parameters, and of the modules' buffers."""
        buffers = (buffer for module in self.modules.values() for buffer in module._buffers.values())
        return {memory_of(x) for x in (*self.named().values(), *buffers) if x is not None} - {None}

    @contextmanager
    def seen(self, block: str, writes: FirstWrites | None) -> Generator[None]:
        """A block of code in which the forward of a `block` runs; its `writes` are seen if it may write to parameters.

        torch counts what is written to a parameter, but not what is written to its `data`.
        """
        named, copies = self.named(), dict[str, Tensor]()
        before = {name: version_of(p) for name, p in named.items()}
        if writes is not None:
            for name, p in named.items():
                writes.before(p, partial(copied_to, copies, name, p))
        with nullcontext() if writes is None else Operations(writes):
            yield
        counted = {name for name, p in named.items() if version_of(p) != before[name]}
        if counted and writes is None:
            raise PlanError(
                f"{block}, a block in recompute, writes to {min(counted)} in some calls and not in others: it would be "
                f"computed again with other numbers. Leave it out of recompute"
            )
        changed = {name for name, copy in copies.items() if not torch.equal(copy, named[name])}
        self.written = frozenset({*counted, *changed})
        self.left = [(name, p, version_of(p)) for name, p in named.items() if name not in changed]
        self.moved = [(named[name], copies[name]) for name in changed]

    def check(self) -> None:
        """Raise if others than the forward wrote to a parameter since."""
        for name, p, version in self.left:
            if version_of(p) != version:
                raise PlanError(
                    f"{name} of a block in recompute was written to after the block's forward and before its backward, "
                    f"which would compute the block again with other numbers: write to it after the step, or leave the "
                    f"block out of recompute"
                )

    def put_back(self) -> None:
        """Give the modules what they had."""
        for module, table in zip(self.modules.values(), self.tables, strict=True):
            module._parameters.update(table)
        put(self.moved)


def copied_to(copies: dict[str, Tensor], name: str, p: Tensor) -> None:
    """Copy a parameter."""
    copies[name] = p.detach().clone()


def put(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Put numbers into parameters; torch does not count it."""
    for p, copy in copies:
        p.data.copy_(copy)


def held_with_hooks(modules: Mapping[str, nn.Module]) -> HeldState:
    """What modules hold now, and their hooks."""
    return HeldState.by(modules, commons=Commons.of(modules.values(), hooks=True))


@contextmanager
def again(before: HeldState, parameters: HeldParameters) -> Generator[None]:
    """A block in which a module finds what it held before its forward; afterwards it holds what it holds now.

    Hooks that are registered in it are removed: backward goes through the tensors of the first time, which have theirs.
    """
    parameters.check()
    now, tables = held_with_hooks(before.modules), HeldParameters.by(before.modules)
    numbers = [(p, p.detach().clone()) for p, _ in parameters.moved]
    before.put_back()
    parameters.put_back()
    try:
        with without_new_hooks(), buffers_put_back():
            yield
    finally:
        now.put_back(always=True)  # torch counts no write of the first one
        tables.put_back()
        put(numbers)


@contextmanager
def without_new_hooks() -> Generator[None]:
    """A block of code after which the hooks that were registered in it, on whatever tensors, are gone."""
    plain, handles = RemovableHandle.__init__, list[RemovableHandle]()

    def registered(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        handles.append(self)

    RemovableHandle.__init__ = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        RemovableHandle.__init__ = plain  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()
