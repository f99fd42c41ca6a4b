"""A tape: torch's own operations, noted while they run, to be run again on other tensors without the Python above them.

    tape:   0, 1 given      2 = convolution(0, 1)      3 = relu(2)      4 = sum(3)      …      9 returned

Everything between the tensors that are given and those that are returned is on it: autograd's backward, casts of
autocast, custom functions. Numbers, shapes and offsets are those of the run that was noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from mural.memory.call_draws import is_random


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor on the tape, by its number."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor that Python made of numbers."""

    values: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        mine, theirs = self.values, other.values
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)

    __hash__ = None  # type: ignore[assignment]


NAN = math.nan
FRESH = torch.ops.aten.lift_fresh.default
"""Through here, a tensor that Python made of numbers reaches torch's operations."""
READ_BY = ("size", "stride", "storage_offset", "is_conj", "is_neg")
"""What says how the numbers of a view are read from memory."""
Step = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
"""An operation, its arguments, and its results; tensors are slots."""
Replay = Callable[..., Sequence[Tensor]]


class Tape(TorchDispatchMode):
    """Notes operations on tensors that come from those given; `failed` says why the tape cannot be used."""

    def __init__(self, given: Sequence[Tensor]):
        super().__init__()
        self.slots = WeakTensorKeyDictionary()
        self.given, self.count = len(given), 0
        self.steps: list[Step] = []
        self.results: tuple[Slot, ...] = ()
        self.failed = "" if len({id(t) for t in given}) == len(given) else "a tensor is given twice"
        for tensor in given:
            self._new(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        if func is FRESH and args[0] not in self.slots:
            noted: tuple[Any, ...] = (Constant(args[0].clone()),), {}
        else:
            noted = tuple(map(self._argument, args)), {n: self._argument(item) for n, item in (kwargs or {}).items()}
        made = func(*args, **(kwargs or {}))
        if func.is_view and isinstance(made, Tensor) and isinstance(noted[0][0], Slot) and same_view(made, args[0]):
            self.slots[made] = noted[0][0]  # nothing to run again
            return made
        if is_random(func):
            self.failed = f"{func} is random"
        self.steps.append((func, *noted, self._result(made)))
        return made

    def end(self, tensors: Sequence[Tensor]) -> None:
        """Note what is returned."""
        self.results = tuple(map(self._argument, tensors))
        self.slots = WeakTensorKeyDictionary()

    def _new(self, tensor: Tensor) -> Slot:
        slot = self.slots[tensor] = Slot(self.count)
        self.count += 1
        return slot

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            found = self.slots.get(item)
            if found is None:
                self.failed = f"a tensor of shape {tuple(item.shape)} comes from elsewhere"
            return found
        if type(item) in (list, tuple):
            return type(item)(map(self._argument, item))
        return NAN if item != item else item  # which is equal to itself, as an object

    def _result(self, made: Any) -> Any:
        if isinstance(made, Tensor):
            return self.slots.get(made) or self._new(made)
        if isinstance(made, (list, tuple)):
            return tuple(map(self._result, made))
        if made is not None:
            self.failed = f"a number is read off a tensor: {made}"
        return None

    def same(self, other: Tape) -> bool:
        """Whether another tape has the same operations with the same arguments."""
        try:
            return (self.given, self.steps, self.results) == (other.given, other.steps, other.results)
        except (RuntimeError, ValueError):
            return False

    def replay(self, steps: Sequence[Step], more: Sequence[Slot] = ()) -> Replay:
        """A function of the given tensors, and of more, that runs steps: those that were noted, or simpler ones.

        It lets go of each tensor after its last use.
        """
        text = ReplayText()
        last: dict[Slot, int] = {}
        for number, (_, args, kwargs, made) in enumerate(steps):
            last.update(dict.fromkeys(slots_in((args, list(kwargs.values()), made)), number))
        last.update(dict.fromkeys(self.results, len(steps)))
        done: dict[int, list[str]] = {}
        for slot, number in last.items():
            done.setdefault(number, []).append(text.of(slot))
        for number, (func, args, kwargs, made) in enumerate(steps):
            # A copy of a constant, as somebody may write to it.
            name = text.of(torch.ops.aten.clone.default if func is FRESH else func)
            given = [*map(text.of, args), *(f"{key}={text.of(item)}" for key, item in kwargs.items())]
            text.lines.append(f"{text.of(made, '_')} = {name}({', '.join(given)})")
            text.lines.append(f"del {', '.join(done[number])}" if number in done else "")
        return text.function([text.of(slot) for slot in (*map(Slot, range(self.given)), *more)], text.of(self.results))


class ReplayText:
    """The source of a function, and the objects that its names stand for."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.lines: list[str] = []

    def of(self, item: Any, nothing: str = "None") -> str:
        """How an item is written."""
        if isinstance(item, Slot):
            return f"t{item.number}"
        if item is None or type(item) in (int, bool):
            return nothing if item is None else repr(item)
        if type(item) in (list, tuple):
            return f"[{', '.join(self.of(part, nothing) for part in item)}]"
        name = f"c{len(self.names)}"
        self.names[name] = item.values if isinstance(item, Constant) else item
        return name

    def function(self, given: Sequence[str], result: str) -> Replay:
        """The function, compiled."""
        body = "".join(f"    {line}\n" for line in (*self.lines, f"return {result}") if line)
        exec(compile(f"def replay({', '.join(given)}):\n{body}", "<tape>", "exec"), self.names)
        return self.names["replay"]


def same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that share memory are the same numbers in it, read alike."""
    return all(getattr(one, name)() == getattr(other, name)() for name in READ_BY) and one.dtype == other.dtype


def slots_in(item: Any) -> list[Slot]:
    """The slots among arguments or results."""
    if isinstance(item, Slot):
        return [item]
    return [slot for part in item for slot in slots_in(part)] if isinstance(item, (list, tuple)) else []
