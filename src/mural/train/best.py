"""The best validation of a run: by which score, after which step, and how many came after it without a better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mural.errors import ConfigError
from mural.train.config import Config

Validations = Sequence[tuple[int, Mapping[str, Any]]]
"""The step and the scores of each validation, in their order."""
LESS_IS_BETTER = ("loss", "error")


@dataclass(frozen=True)
class Best:
    """The best validation so far, the first of equal ones."""

    score: str
    step: int
    value: float
    since: int
    """Validations after it."""


def watched(config: Config) -> str:
    """The score that a run is judged by: checkpoint.best, or the loss where it is to stop early; else nothing."""
    name = config.checkpoint.best.removeprefix("validation/")
    return name or ("loss" if config.train.stop_after else "")


def best_of(validations: Validations, config: Config) -> Best | None:
    """The best of validations by the score that the run is judged by; None without such a score or validations.

    >>> config = Config.of({"checkpoint": {"best": "accuracy"}})
    >>> best_of([(10, {"accuracy": 0.5}), (20, {"accuracy": 0.7}), (30, {"accuracy": 0.6})], config)
    Best(score='accuracy', step=20, value=0.7, since=1)
    """
    name = watched(config)
    if not name or not validations:
        return None
    for step, scores in validations:
        if not isinstance(scores.get(name), float):
            known = [key for key, value in scores.items() if isinstance(value, float)]
            raise ConfigError(
                f'checkpoint.best = "{config.checkpoint.best}": the validation after step {step} has no such score: '
                f"choose one of {', '.join(known)}"
            )
    wanted = config.checkpoint.best_is
    least = name.endswith(LESS_IS_BETTER) if wanted == "auto" else wanted == "min"
    values = [float(scores[name]) for _, scores in validations]
    # Whatever is not a number is never the best, unless there is nothing else.
    ranks = [(value != value, value if least else -value) for value in values]
    place = min(range(len(ranks)), key=ranks.__getitem__)
    return Best(name, validations[place][0], values[place], len(values) - 1 - place)
