"""The arguments of a call: the tensors among them, and whether they are those with which it was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.graph.nodes import Node, Ref
from mural.graph.script import Key
from mural.graph.sites import At
from mural.graph.without_memory import Absent

PLAIN = frozenset([int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device])
"""The types of most arguments that are not tensors."""


def alike(recorded: Any, given: Any, key_of: Callable[[Any], Key | None], loose: bool = False) -> bool:
    """Whether what is given has the form that was recorded, with the same tensors of the graph at the same places.

    Floating-point numbers may differ, and so may whole numbers if the call is `loose`: they only change values.
    """
    key = key_of(recorded)
    if key is not None:
        if isinstance(given, Absent):
            return given.key == key
        # The model's own tensors have names; a tensor that was rebound since may be another one.
        return isinstance(given, Tensor) and isinstance(key[0], str)
    if isinstance(given, Tensor):
        return False
    if isinstance(recorded, (tuple, list)):
        return (
            isinstance(given, (tuple, list))
            and len(given) == len(recorded)
            and all(alike(a, b, key_of, loose) for a, b in zip(recorded, given, strict=True))
        )
    if isinstance(recorded, dict):
        return (
            isinstance(given, dict)
            and recorded.keys() == given.keys()
            and all(alike(recorded[k], given[k], key_of, loose) for k in recorded)
        )
    if type(recorded) is type(given) and not pytree.tree_is_leaf(recorded):
        return alike(pytree.tree_leaves(recorded), pytree.tree_leaves(given), key_of, loose)
    return same_leaf(recorded, given, loose)


def same_leaf(recorded: Any, given: Any, loose: bool) -> bool:
    """Whether two arguments that are not tensors mean the same, as far as shapes go."""
    if recorded is given or isinstance(recorded, (torch.device, torch.Generator)):
        return True
    if isinstance(recorded, bool) or isinstance(given, bool):
        return isinstance(given, bool) and recorded == given
    if isinstance(recorded, (int, float)) and isinstance(given, (int, float)):
        if loose or (isinstance(recorded, float) and isinstance(given, float)):
            return True
        return type(recorded) is type(given) and recorded == given
    if type(recorded) is not type(given):
        return False
    try:
        return bool(recorded == given) or (isinstance(recorded, object) and type(recorded).__eq__ is object.__eq__)
    except Exception:  # arrays and the like are not compared
        return True


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the arguments or results of a call, in the order of its leaves."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind in PLAIN:
        return []
    if kind is tuple or kind is list:
        return [x for part in tree for x in tensors_in(part)]
    if kind is dict:
        return [x for part in tree.values() for x in tensors_in(part)]
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def at_of(at: Any) -> Key | None:
    """The tensor that an `At` stands for; None for other leaves."""
    return (at.source, at.pick) if isinstance(at, At) else None


def ref_of(node: Node) -> Callable[[Any], Key | None]:
    """The tensors that a node's `Ref`s stand for."""
    return lambda ref: (node.inputs[ref.index], node.picks[ref.index]) if isinstance(ref, Ref) else None


def loose(node: Node) -> bool:
    """Whether a call gives the same shapes for any numbers among its arguments."""
    return node.kind == "pointwise"
