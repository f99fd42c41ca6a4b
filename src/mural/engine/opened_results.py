"""Results that are dataclasses, opened so that the tensors in them are seen, and closed again."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Opened:
    """The values of a dataclass's fields by name, and what else an instance of it holds."""

    kind: type
    values: dict[str, Any]
    others: dict[str, Any]

    def closed(self) -> Any:
        """An instance with these values."""
        made = object.__new__(self.kind)
        for name, value in {**self.others, **self.values}.items():
            object.__setattr__(made, name, value)
        return made


register: Any = pytree.register_pytree_node  # torch's stubs do not know all of its arguments
register(
    Opened,
    lambda found: ([*found.values.values()], (found.kind, [*found.values], found.others)),
    lambda values, about: Opened(about[0], dict(zip(about[1], values, strict=True)), about[2]),
    flatten_with_keys_fn=lambda found: (
        [(pytree.GetAttrKey(name), value) for name, value in found.values.items()],
        (found.kind, [*found.values], found.others),
    ),
)


def opened(result: Any) -> Any:
    """A result with each dataclass opened, also inside others, tuples, lists and dicts."""

    def of(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        values = {field.name: getattr(leaf, field.name) for field in fields(leaf) if hasattr(leaf, field.name)}
        others = {name: value for name, value in getattr(leaf, "__dict__", {}).items() if name not in values}
        return Opened(type(leaf), {name: opened(value) for name, value in values.items()}, others)

    return pytree.tree_map(of, result)


def closed(result: Any) -> Any:
    """The result with its dataclasses."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Opened):
            return leaf
        return Opened(leaf.kind, {name: closed(value) for name, value in leaf.values.items()}, leaf.others).closed()

    return pytree.tree_map(of, result, is_leaf=lambda leaf: isinstance(leaf, Opened))
