"""Call-sites: the names of a graph's nodes, which are the names that a plan uses.

    head              the call is all that this call of the module `head` does
    head@2            the same for the module's second call
    head/add:1        the first `add` in the forward of `head`, which does more than that
    head@2/add:1      the same in the module's second call
    add:1             the first `add` in the forward of the model itself, which has no name

A call belongs to the innermost module that is running: its forward and its hooks. A module that is in
the model under several names has the first of them. Calls of a module, and of an operation in one call of a
module, are counted from 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class At:
    """A placeholder for a tensor in a module's call: who made it, which of its outputs it is, what wrote to it."""

    source: int | str
    pick: int = 0
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its path, the number of this call, and the call that it happened in (None: the model's).

    The nodes from `start` to `stop` - 1 happened in it. `kind` is the module's class. `args`, `kwargs` and `outputs`
    are what it was given and gave back, with an `At` for each tensor; `sealed` is false where one was not seen. `left`
    says for each tensor that it was given what that is afterwards, and `time` when it began.
    """

    module: str
    number: int
    parent: int | None
    start: int = 0
    stop: int = 0
    kind: str = ""
    sealed: bool = True
    args: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    outputs: Any = field(default=None, compare=False, repr=False)
    left: tuple[At | None, ...] = field(default=(), compare=False, repr=False)
    time: int = field(default=0, compare=False, repr=False)

    @property
    def label(self) -> str:
        """`path`, or `path@2` for the second call."""
        return self.module if self.number == 1 else f"{self.module}@{self.number}"


def sites(ops: Sequence[tuple[int, str]], calls: Sequence[ModuleCall]) -> list[str]:
    """The site of each operation, given as (index of the module's call, name).

    >>> calls = [ModuleCall("", 1, None), ModuleCall("conv", 1, 0), ModuleCall("conv", 2, 0)]
    >>> sites([(1, "conv2d"), (2, "conv2d"), (0, "add"), (0, "add")], calls)
    ['conv', 'conv@2', 'add:1', 'add:2']
    """
    inside: Counter[int] = Counter()
    for index, _ in ops:
        at: int | None = index
        while at is not None:
            inside[at] += 1
            at = calls[at].parent
    seen: Counter[tuple[int, str]] = Counter()
    names: list[str] = []
    for index, op in ops:
        seen[index, op] += 1
        label = calls[index].label
        whole = inside[index] == 1 and label
        names.append(label if whole else f"{label}/{op}:{seen[index, op]}".removeprefix("/"))
    return names
