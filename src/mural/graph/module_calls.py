"""The calls of modules while a forward pass runs: seen, noted, and handed to a callback that decides about them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mural.graph.sites import At, ModuleCall

Seen = Callable[[nn.Module, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a module: `seen(module, path, plain, args, kwargs)`, where `plain(*args, **kwargs)` calls it."""

SLOT = "_compiled_call_impl"
"""What a module is called by, if it is not None: `nn.Module.compile` sets it. Unlike `__call__`, it is an ordinary
attribute of the class, and setting it does not make Python look at every class of modules."""


class Interception:
    """Is in the slot of all modules. Calls of the model's modules are handed to `seen`, others run as before.

    While it is `paused`, all run as before.
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
        """A compiled module is called by this, if it is called at all."""
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
        interception.seen = called  # whoever sees calls often holds this: both would wait for the garbage collector


def called(module: nn.Module, path: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """The call itself."""
    return plain(*args, **kwargs)


Find = Callable[[Tensor], At | None]
"""Where a tensor comes from, None for one that no call was seen to make."""


class ModuleCalls:
    """The calls so far, that of the model first, and which of them are running."""

    def __init__(self, find: Find, count: Callable[[], int]) -> None:
        self.calls = [ModuleCall("", 1, None)]
        self.running = [0]
        self._find, self._count = find, count

    @property
    def innermost(self) -> int:
        """The index of the call that runs now."""
        return self.running[-1]

    @contextmanager
    def following(self, model: nn.Module) -> Generator[None]:
        """Know which module of the model is running, its hooks included."""
        counts: Counter[str] = Counter()

        def call(module: nn.Module, path: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            counts[path] += 1
            index = self._begin(
                ModuleCall(path, counts[path], self.innermost, kind=type(module).__name__), args, kwargs
            )
            given = pytree.tree_leaves((args, kwargs))
            try:
                result = plain(*args, **kwargs)
            finally:
                self.running.pop()
            self.end(index, result, given)
            now = pytree.tree_leaves((args, kwargs))
            if len(now) != len(given) or any(a is not b for a, b in zip(now, given, strict=True)):
                # It has changed a list or dict of its caller's, as dense blocks do: a way past its results.
                self.calls[index] = replace(self.calls[index], sealed=False)
            return result

        with intercepted(paths_of(model), call):
            yield

    def begin_model(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Note what the model itself is given."""
        self.calls[0] = self._given(replace(self.calls[0], kind=type(model).__name__), args, {})

    def _begin(self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        self.calls.append(self._given(call, args, kwargs))
        self.running.append(len(self.calls) - 1)
        return self.running[-1]

    def _given(self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
        given, sealed = self._noted((args, kwargs))
        return replace(call, start=self._count(), args=given[0], kwargs=given[1], sealed=sealed)

    def end(self, index: int, result: Any, given: Sequence[Any] = ()) -> None:
        """Note what a call gave back, and what became of the tensors that it was given."""
        call = self.calls[index]
        outputs, sealed = self._noted(result)
        left = tuple(self._find(leaf) for leaf in given if isinstance(leaf, Tensor))
        sealed = sealed and call.sealed
        self.calls[index] = replace(call, stop=self._count(), outputs=outputs, left=left, sealed=sealed)

    def _noted(self, tree: Any) -> tuple[Any, bool]:
        """The tree with an `At` for each tensor, and whether the origin of each was seen."""
        leaves, shape = pytree.tree_flatten(tree)
        noted = [self._find(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        seen = all(at is not None for at, leaf in zip(noted, leaves, strict=True) if isinstance(leaf, Tensor))
        return pytree.tree_unflatten(noted, shape), seen

    def renumbered(self, kept: Sequence[int], new: Mapping[int, int]) -> tuple[ModuleCall, ...]:
        """The calls, with the nodes' final ids; `kept` are the old ids of the nodes that stay, in order."""

        def moved(at: Any) -> Any:
            if not isinstance(at, At):
                return at
            source = new.get(at.source, at.source) if isinstance(at.source, int) else at.source
            return At(source, at.pick, tuple(new.get(n, n) for n in at.after))

        return tuple(
            replace(
                call,
                time=call.start,
                start=bisect_left(kept, call.start),
                stop=bisect_left(kept, call.stop),
                args=pytree.tree_map(moved, call.args),
                kwargs=pytree.tree_map(moved, dict(call.kwargs)),
                outputs=pytree.tree_map(moved, call.outputs),
                left=tuple(map(moved, call.left)),
            )
            for call in self.calls
        )
