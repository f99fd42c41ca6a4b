"""Watches what a rank does, from outside: messages below `torch.distributed`, boxes of modules' results, keys drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import mural
from law import tensors_of
from mural.comm.trace import Observed
from mural.geometry import Box
from mural.shard.ops.random import lattice

TO, FROM, SIGNS = ("send",), ("recv",), "←→"
TOGETHER = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "broadcast", "reduce", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "barrier",
)  # fmt: skip
"""What a process group does: every message and collective of torch passes through one of these methods."""


@dataclass
class Watch:
    """What one rank did, in order. Behind a # is what helps a reader, and is not compared."""

    names: dict[int, str]
    messages: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    boxes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    draws: dict[str, None] = field(default_factory=dict[str, None])
    about: str = ""

    def sent(self) -> list[str]:
        """The messages since the last call, as lines: a new one where receives follow sends, for each collective."""
        lines: list[tuple[list[str], str]] = []
        before = ""
        for text, about in self.messages:
            if not lines or text[0] not in SIGNS or before not in SIGNS or text[0] < before or len(lines[-1][0]) > 7:
                lines.append(([], about))
            lines[-1][0].append(text)
            before = text[0]
        self.messages.clear()
        return [f"{' '.join(texts)}  # {about}".rstrip(" #") for texts, about in lines]

    def message(self, method: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        """Note a call of a process group. A first message of one byte, where ranks meet, depends on earlier tests.

        Of texts, which ranks compare, the size is not told.
        """
        ranks, tensors = dist.get_process_group_ranks(group), tensors_of(list(args[:1]))
        size = sum(t.nbytes for t in tensors)
        words = "text" if any(t.dtype == torch.uint8 for t in tensors) else str(size)
        if size == 1:
            return
        if method in TO + FROM:
            self.messages.append((f"{SIGNS[method in TO]}{ranks[args[1]]}:{words}", self.about))
        else:
            self.messages.append((f"{method.strip('_')} of {','.join(map(str, ranks))}: {words}", self.about))

    def result(self, module: nn.Module, output: Any) -> None:
        """Note the boxes of what a module gave."""
        for one in tensors_of(output):
            if isinstance(one, mural.ShardedTensor) and id(module) in self.names:
                names = self.boxes.setdefault(f"{tuple(one.shape)}, here {in_words(one.box)}", [])
                names += [] if self.names[id(module)] in names else [self.names[id(module)]]


@contextmanager
def watching(model: nn.Module) -> Generator[Watch]:
    """A block in which this rank is watched."""
    watch = Watch({id(module): name for name, module in model.named_modules() if not [*module.children()]})
    with ExitStack() as stack:
        for method in (*TO, *FROM, *TOGETHER):
            stack.enter_context(replaced(dist.ProcessGroup, method, seen(watch, method)))
        stack.enter_context(replaced(Observed, "note", noted(watch, Observed.note)))
        key = lattice.new_key
        for name, module in [*sys.modules.items()]:
            if name.startswith("mural.") and getattr(module, "new_key", None) is key:
                stack.enter_context(replaced(module, "new_key", drawn(watch, key)))
        hook = register_module_forward_hook(lambda module, _, output: watch.result(module, output))
        stack.callback(hook.remove)
        yield watch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """A block in which an attribute has another value."""
    before = vars(owner)[name]  # not what `getattr` makes of it: a method of C++ would take no group afterwards
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def seen(watch: Watch, method: str) -> Callable[..., Any]:
    """A method of a process group that notes its calls."""
    original = getattr(dist.ProcessGroup, method)

    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        watch.message(method, group, args)
        return original(group, *args, **kwargs)

    return call


def noted(watch: Watch, original: Callable[..., None]) -> Callable[..., None]:
    """The transport's own note, whose name says what the messages after it are for."""

    def note(self: Any, name: str, *args: Any) -> None:
        watch.about = name
        original(self, name, *args)

    return note


def drawn(watch: Watch, key: Callable[[], int]) -> Callable[[], int]:
    """The keys of random calls, noted where they are drawn first: tiles draw them over and over."""

    def new_key() -> int:
        found = key()
        watch.draws[f"{found & 2**64 - 1:016x}"] = None
        return found

    return new_key


def in_words(box: Box) -> str:
    """A box in short.

    >>> from mural.geometry import Interval
    >>> in_words((Interval(0, 2), Interval(4, 9)))
    '0:2 4:9'
    """
    return " ".join(f"{interval.start}:{interval.stop}" for interval in box)


def number(value: float, exact: bool) -> str:
    """A number in full: its bits where all machines find the same, else its digits, which the comparer rounds."""
    return value.hex() if exact else f"{value:.14e}"
