"""What the modules of a model hold besides their parameters: kept, put back, compared.

A forward may count its calls, anneal an attribute, move a buffer, fill a list, draw from `random`. Where it runs
several times for what is one forward pass of the model (micro-batches, a recompute, a rehearsal), each run has to begin
with what the first one found, and what they leave has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor, nn

from mural.graph.commons import DRAWS, Commons, Name
from mural.graph.kept_values import KeptValue, clones, content, copy_all, has_values, kept, moved, renew

STANDARD = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that every module has, and that a forward does not change."""


@dataclass
class HeldState:
    """What some modules hold at one time. `passed` are buffers that are to move with every run, by `id`."""

    modules: Mapping[str, nn.Module]
    commons: Commons
    passed: frozenset[int] = frozenset()
    attributes: dict[str, dict[str, KeptValue]] = field(default_factory=dict[str, dict[str, KeptValue]])
    buffers: dict[str, dict[str, KeptValue]] = field(default_factory=dict[str, dict[str, KeptValue]])
    shallow: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The attributes of torch's own layers, whose forward changes nothing in place."""

    @classmethod
    def by(
        cls,
        modules: Mapping[str, nn.Module],
        passed: Iterable[int] = (),
        values: bool = True,
        commons: Commons | None = None,
    ) -> HeldState:
        """What modules hold now, by path; without `values` tensors are not copied, for a run that writes to none.

        `commons` are what they have in common, where the caller has it already.
        """
        held = cls(modules, commons or Commons.of(modules.values()), frozenset(passed))
        later: list[tuple[str, str, Tensor]] = []
        for path, module in modules.items():
            norm = values and isinstance(module, nn.modules.batchnorm._NormBase)
            own = {n: b for n, b in module._buffers.items() if id(b) not in held.passed}
            held.buffers[path] = {n: kept(b, values and not norm) for n, b in own.items()}
            later += [(path, n, b) for n, b in own.items() if norm and b is not None and has_values(b)]
            if own_to_torch(module):
                held.shallow[path] = dict(vars(module))
                continue
            held.attributes[path] = {n: kept(v, values) for n, v in vars(module).items() if n not in STANDARD}
        for (path, n, b), copy in zip(later, clones([b for _, _, b in later]), strict=True):
            held.buffers[path][n] = KeptValue(b, (b._version, copy), always=True)
        return held

    def put_back(self, only: Container[str] | None = None, always: bool = False) -> None:
        """Give the modules what they held then: all, or those of some paths.

        With `always`, tensors too of which torch counted no write since: another state may have been put back.
        """
        for path, module in self.modules.items():
            if only is not None and path not in only:
                continue
            put_back(module._buffers, self.buffers[path], self.passed, always=always)
            if path in self.attributes:
                put_back(vars(module), self.attributes[path], frozenset(), STANDARD, always)
            elif not identical(vars(module), self.shallow[path]):
                vars(module).clear()
                vars(module).update(self.shallow[path])
        paths = [path for path in self.modules if only is None or path in only]
        norms = [was for path in paths for was in self.buffers[path].values() if was.always]
        copy_all([was.value for was in norms], [was.content[1] for was in norms])
        self.commons.put_back()

    def changes(self, only: Container[str] | None = None) -> dict[Name, Any]:
        """What these modules no longer hold as it was, by name, with what it is now; the rest: `commons.changes()`."""
        found: dict[Name, Any] = {}
        for path, module in self.modules.items():
            if only is not None and path not in only:
                continue
            pairs = [(n, v, self.buffers[path].get(n)) for n, v in module._buffers.items() if id(v) not in self.passed]
            if path in self.attributes:
                pairs += [(n, v, self.attributes[path].get(n)) for n, v in vars(module).items() if n not in STANDARD]
            elif not identical(vars(module), self.shallow[path]):
                pairs += [(n, v, KeptValue(self.shallow[path].get(n, found))) for n, v in vars(module).items()]
            found |= {(path, n): content(v, True) for n, v, was in pairs if moved(v, was)}
        return found


def own_to_torch(module: nn.Module) -> bool:
    """Whether a module is one of torch's layers, without hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module).__module__.startswith("torch.nn.modules") and not hooked


def identical(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two dicts have the same objects in the same order."""
    return len(now) == len(before) and all(map(is_, now.values(), before.values()))


def put_back(
    now: dict[str, Any],
    before: Mapping[str, KeptValue],
    passed: frozenset[int],
    skip: frozenset[str] = frozenset(),
    always: bool = False,
) -> None:
    """Make a module's dict what it was."""
    for name in [n for n, v in now.items() if n not in before and n not in skip and id(v) not in passed]:
        del now[name]
    for name, was in before.items():
        if now.get(name) is not was.value:
            now[name] = was.value
        renew(was, always)


@contextmanager
def as_it_was(model: nn.Module) -> Generator[None]:
    """Whatever runs in the block, the modules of a model hold afterwards what they hold now."""
    held = HeldState.by(dict(model.named_modules()), values=False)
    try:
        yield
    finally:
        held.put_back()


# -- attributes that a forward changes ---------------------------------------------------------------------------------


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
        self.carried: set[str] = set()
        """Buffers that were rebound, numbers that were counted on, Python's generators that were drawn from: what the
        next forward finds changed.
        """
        self.left: dict[Name, Any] = {}
        """What the forward left in attributes, and in variables outside the model, that was not there before."""

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch the block; afterwards `changed` has the attributes that changed in it."""
        held = HeldState.by(self.modules, values=False)
        plain = nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if name not in STANDARD and name in object.__getattribute__(module, "__dict__"):
                self.note(module, name)
            return value

        def write(module: nn.Module, name: str, value: Any) -> None:
            path = self.paths.get(id(module), "")
            counts = (path, name) in self.found and is_number(vars(module).get(name)) and is_number(value)
            # A module that torch.jit makes is set up without buffers.
            if counts or name in vars(module).get("_buffers", ()):
                self.carried.add(f"{path}.{name}".lstrip("."))
            self.note(module, name)
            plain(module, name, value)

        nn.Module.__getattribute__, nn.Module.__setattr__ = read, write  # type: ignore[method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = plain  # type: ignore[method-assign]
        common, changes = held.commons.changes(), held.changes()
        self.carried.update(name[0] for name in DRAWS if name in common)
        self.left = {name: value for name, value in (changes | common).items() if name not in DRAWS}
        names = [name for name in changes if name in self.found]
        own = {name for name in names if registered(self.modules[name[0]], name[1])}
        self.changed = {name: frozenset(self.found[name]) for name in names if name not in own}

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute is read or set in the call that runs."""
        path = self.paths.get(id(module))
        if path is not None:
            self.found.setdefault((path, name), set()).add(self.innermost())


def registered(module: nn.Module, name: str) -> bool:
    """Whether an attribute is a parameter or buffer of a module: these are followed as tensors."""
    return name in module._parameters or name in module._buffers


def is_number(value: Any) -> bool:
    """Whether a value counts, as no flag does."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
