"""Functions that torch.jit compiled: refused where mural has to see every call.

They run in a separate interpreter, below `__torch_function__`: with a sharded tensor they would end in an error of the
interpreter, in a capture they would leave no trace. So both kinds of compiled functions are wrapped: they refuse
sharded tensors, and inside a `refusing_compiled` block every call. Nothing else about them changes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from mural.errors import UnsupportedOp
from mural.shard.tensor import sharded_in

_builtin: Any = torch._C
_watchers: list[Callable[[str], UnsupportedOp]] = []


def called(function: Any) -> str:
    """The name of a compiled function, or of the module and its method."""
    if isinstance(function, _builtin.ScriptMethod):
        owner = str(function.owner._type().qualified_name()).rpartition(".")[2]
        return f"{owner}.{function.name}"
    return str(function.qualified_name).rpartition(".")[2]


def refusal(function: Any) -> str:
    """The message about a compiled function, and what to do."""
    return (
        f"{called(function)} was compiled by torch.jit and runs in its interpreter, where its calls cannot be seen: "
        f"set PYTORCH_JIT=0 in the environment of every rank, which leaves functions and modules as the Python that "
        f"they were written in; or use the Python function or module that was scripted, traced or saved"
    )


def watched(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a compiled function, which refuses sharded tensors."""

    @wraps(call)
    def checked(function: Any, *args: Any, **kwargs: Any) -> Any:
        if _watchers:
            raise _watchers[-1](refusal(function))
        if sharded := sharded_in(args, kwargs):
            error = UnsupportedOp(f"{refusal(function)}; or give it .full() if the whole tensor fits on one rank")
            sharded[0].mesh.transport.raised(error)
            raise error
        return call(function, *args, **kwargs)

    checked.__mural__ = True  # type: ignore[attr-defined]
    return checked


def watch_compiled() -> None:
    """From now on, let compiled functions check their arguments."""
    for kind in (_builtin.ScriptFunction, _builtin.ScriptMethod):
        if not hasattr(kind.__call__, "__mural__"):
            kind.__call__ = watched(kind.__call__)


@contextmanager
def refusing_compiled(refused: Callable[[str], UnsupportedOp]) -> Generator[None]:
    """Inside the block every compiled function raises what `refused` makes of the message."""
    _watchers.append(refused)
    try:
        yield
    finally:
        _watchers.remove(refused)
