"""The forms of a call: as given, by keyword, as a method, in place, with `out=`, by another name."""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hunt.rules_samples import Sample, sample_of

Form = Literal["given", "keyword", "method", "method by keyword", "in place", "out", "alias"]
FORMS: tuple[Form, ...] = get_args(Form)


class Hole:
    """Stands for a tensor among the arguments of a call."""


@dataclass(frozen=True)
class Reference:
    """A function that cannot be sent to ranks: they look it up."""

    name: str
    number: int
    attribute: str

    def found(self) -> Callable[..., Any]:
        """The function."""
        return attribute_of(sample_of(self.name, torch.float64, self.number), self.attribute, self.number)


@dataclass(frozen=True)
class Run:
    """A call in a form, to be made on other tensors in the place of the sample's."""

    function: Callable[..., Any] | Reference
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    form: Form

    @property
    def writes(self) -> bool:
        """Whether torch's function itself writes to its first argument."""
        return getattr(self.function, "__name__", "").endswith("_") and isinstance(self.leaves[0], Hole)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if self.form == "in place" or self.writes:
            target = tensors[0].clone()
            return self._call([target, *tensors[1:]]), target
        if self.form != "out":
            return self._call(tensors)
        with torch.no_grad():
            targets = pytree.tree_map(lambda t: torch.full_like(t, 1), self._call(tensors))
            targets = tuple(targets) if isinstance(targets, (tuple, list)) else targets
            return self._call(tensors, out=targets), targets

    def _call(self, tensors: Sequence[Tensor], **more: Any) -> Any:
        others = iter(tensors)
        given = [next(others) if isinstance(leaf, Hole) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        function = self.function.found() if isinstance(self.function, Reference) else self.function
        return function(*args, **kwargs, **more)


def form_of(name: str, number: int, sample: Sample, form: Form) -> Run | None:
    """The call in a form; None if torch does not offer it so."""
    args, kwargs = sample.args, sample.kwargs
    attribute = {"method by keyword": "method", "in place": "in_place"}.get(form, form)
    attribute = attribute if attribute in ("method", "in_place", "alias") else "function"
    function = attribute_of(sample, attribute, number)
    if function is None or "out" in kwargs or (form == "in place" and not is_tensor(args)):
        return None
    if form.endswith("keyword"):
        found = by_keyword(function, args, kwargs, positional=1 if form.startswith("method") else 0)
        if found is None:
            return None
        args, kwargs = found
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        function = Reference(name, number, attribute)
    return Run(function, tuple(Hole() if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec, form)


def is_tensor(args: Sequence[Any]) -> bool:
    """Whether the first argument is a tensor."""
    return bool(args) and isinstance(args[0], Tensor)


def attribute_of(sample: Sample | None, attribute: str, number: int) -> Any:
    """The function of a sample, or another way in which torch offers it."""
    if sample is None:
        return None
    if attribute == "alias":
        return sample.aliases[number % len(sample.aliases)].op if sample.aliases else None
    return getattr(sample, attribute)


def by_keyword(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], positional: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The same call, with arguments by the names that torch takes; None if there are none, or it is another call."""
    if len(args) <= positional:
        return None
    for names in names_of(function, len(args)):
        if any(name in kwargs for name in names[positional:]):
            continue
        found = tuple(args[:positional]), {**dict(zip(names[positional:], args[positional:], strict=False)), **kwargs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                fresh = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, found)
                with torch.random.fork_rng():
                    function(*fresh[0], **fresh[1])
            except Exception:
                continue
        return found
    return None


def names_of(function: Callable[..., Any], count: int) -> list[list[str]]:
    """The names that the first arguments of a function may have, by each of its signatures."""
    try:
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return [named] if len(named) >= count else []
    except (TypeError, ValueError):
        pass
    name, found = function.__name__, []
    for full in (name, f"special_{name}", f"linalg_{name}", f"fft_{name}"):
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{full}"):
            names = [a.name for a in schema.arguments if not a.kwarg_only]
            if len(names) >= count:
                found += [["input" if n == "self" else n for n in names], names]
    return found
