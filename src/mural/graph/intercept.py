"""The calls of a model's modules, handed to somebody who decides what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

Seen = Callable[[nn.Module, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a module: `seen(module, path, plain, args, kwargs)`, where `plain(*args, **kwargs)` calls it."""

SLOT = "_compiled_call_impl"
"""What a module is called by, if it is not None: `nn.Module.compile` sets it. Unlike `__call__`, it is an ordinary
attribute of the class, and setting it does not make Python look at every class of modules."""


class Interception:
    """Stands in the slot of all modules. Those of the model are handed to `seen`, and others called as before.

    While it is `paused`, all are called as before.
    """

    def __init__(self, paths: Mapping[int, str], seen: Seen, before: Any):
        self.paths, self.seen, self.before, self.paused = paths, seen, before, False

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        """What a module is called by."""
        if module is None:
            return None
        before = self.before.__get__(module, kind) if isinstance(self.before, Interception) else None
        plain = before or vars(module).get(SLOT)
        path = None if self.paused else self.paths.get(id(module))
        return plain if path is None else partial(self._call, module, path, plain or module._call_impl)

    def __set__(self, module: nn.Module, value: Any) -> None:
        """A module is compiled: it is called by that, if anybody lets it be called."""
        vars(module)[SLOT] = value

    def _call(self, module: nn.Module, path: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.seen(module, path, plain, args, kwargs)


def paths_of(model: nn.Module) -> dict[int, str]:
    """The paths of a model's modules by `id`, without its own."""
    return {id(module): path for path, module in model.named_modules() if path}


@contextmanager
def intercepted(paths: Mapping[int, str], seen: Seen) -> Generator[Interception]:
    """Inside of the block, calls of these modules, their hooks included, are handed to `seen`.

    torch's own global hooks run before a module's forward hooks, so what those call would be missed.
    """
    before = vars(nn.Module)[SLOT]
    interception = Interception(paths, seen, before)
    setattr(nn.Module, SLOT, interception)
    try:
        yield interception
    finally:
        setattr(nn.Module, SLOT, before)
