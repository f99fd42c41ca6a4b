"""Names of classes: a configuration may give them, and scores are told under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mural.errors import ConfigError


def check_names(names: Sequence[str], known: Sequence[int]) -> None:
    """Raise unless the names are as many as the classes that the model tells apart, if their number is known.

    >>> check_names(["tissue"], [3])
    Traceback (most recent call last):
    mural.errors.ConfigError: data.classes = ['tissue'] names 1 classes, but the model tells 3 apart: name each once
    """
    if names and (len(set(names)) < len(names) or (known and len(names) not in known)):
        apart = f", but the model tells {known[-1]} apart" if known else ""
        raise ConfigError(f"data.classes = {list(names)} names {len(names)} classes{apart}: name each once")


def with_names(scores: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The scores, and those that are a list with one for each class under the names of the classes as well.

    >>> with_names({"loss": 0.5, "iou": [0.9, 0.7]}, ["background", "tissue"])
    {'loss': 0.5, 'iou': [0.9, 0.7], 'iou/background': 0.9, 'iou/tissue': 0.7}
    """
    lists = {key: value for key, value in scores.items() if isinstance(value, list) and len(value) == len(names)}
    named = {f"{key}/{name}": v for key, value in lists.items() for name, v in zip(names, value, strict=True)}
    return {**scores, **named}
