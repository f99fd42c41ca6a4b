"""Attributes that a forward changes, and the calls of modules in which they were touched.

A number that an encoder leaves on itself for a decoder is a way that no tensor shows. Where the two lie in different
stages, only the encoder's rank would have it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mural.graph.commons import Name
from mural.graph.held import STANDARD, HeldState

Touched = dict[Name, frozenset[int]]
"""By module and attribute, the indices of the calls that read or set it."""


class Touches:
    """The attributes of a model that are read or set while its forward runs."""

    def __init__(self, model: nn.Module, innermost: Callable[[], int]):
        self.modules = dict(model.named_modules())
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.innermost = innermost
        self.found: dict[Name, set[int]] = {}
        self.changed: Touched = {}

    @contextmanager
    def watching(self) -> Generator[None]:
        """Notice what happens in the block; afterwards `changed` has the attributes that are not what they were."""
        held = HeldState.by(self.modules, values=False)
        plain = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in STANDARD and name in object.__getattribute__(module, "__dict__"):
                self.note(module, name)
            return value

        def write(module: nn.Module, name: str, value: Any) -> None:
            self.note(module, name)
            plain(module, name, value)

        nn.Module.__getattribute__, nn.Module.__setattr__ = read, write  # type: ignore[method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = plain  # type: ignore[method-assign]
        names = [name for name in held.changes() if name in self.found]
        own = {name for name in names if registered(self.modules[name[0]], name[1])}
        self.changed = {name: frozenset(self.found[name]) for name in names if name not in own}

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute is read or set in the call that runs."""
        path = self.paths.get(id(module))
        if path is not None:
            self.found.setdefault((path, name), set()).add(self.innermost())


def registered(module: nn.Module, name: str) -> bool:
    """Whether an attribute is a parameter or buffer of a module: their ways are those of tensors."""
    return name in module._parameters or name in module._buffers
