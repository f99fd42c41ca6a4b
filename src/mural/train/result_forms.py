"""What results and targets look like before a step: whether a loss can compare them, and which scores there will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mural.data import open as open_source
from mural.data.image_sample import label_of, opened, sample_at
from mural.errors import ConfigError, DataError
from mural.train.config import Config

BY_CLASS = ("cross_entropy", "dice")
"""Losses that take a class for each position."""
NAMED = (*BY_CLASS, "bce", "mse", "l1", "smooth_l1")
"""These, and those that take a value for each number of the result."""
CLASS_SCORES = ("accuracy", "mean_iou", "mean_dice")
Shape = tuple[int, ...]
Kind = Literal["classes", "logits", "probabilities", "values", "unknown"]
"""What the channels of results are: scores of classes, of which the highest is taken; yes or no for each channel, above
0 or above 0.5; the numbers themselves; or nobody knows."""


@dataclass(frozen=True)
class TargetForm:
    """The shape of one image's target, whether it holds classes, and whether it is a label of the whole image."""

    shape: Shape
    classes: bool
    label: bool = False

    @classmethod
    def of(cls, config: Config, samples: Any, extents: Sequence[int]) -> TargetForm | None:
        """That of the first sample, for images of these extents; None where it cannot be known or there is none."""
        sample, mask = sample_at(samples, 0), config.data.mask
        if sample.target is None:
            return None
        if (label := label_of(sample.target)) is not None:
            return cls(tuple(label.shape), not label.is_floating_point(), label=True)
        if mask != "channels":
            return cls(tuple(extents), mask == "classes")
        try:
            return cls((opened(sample.target, sample.name, open_source, len(extents)).shape[0], *extents), False)
        except DataError:  # found again, and told of, when all files are opened
            return None

    def __str__(self) -> str:
        return f"{'labels' if self.label else 'masks'} of shape {self.shape}"


def check_pairing(name: str, result: Shape | None, target: TargetForm | None) -> None:
    """Raise if a loss of mural's list cannot compare a model's results with the targets.

    >>> check_pairing("mse", (2, 8, 8), TargetForm((8, 8), classes=True))
    Traceback (most recent call last):
    mural.errors.ConfigError: loss.name = "mse" cannot compare results of shape (2, 8, 8) with masks of shape (8, 8): \
masks need 2 channels, with data.mask = "channels"; for classes set loss.name = "cross_entropy"
    """
    if name not in NAMED or target is None or not result:
        return
    soft = name == "cross_entropy" and target.shape == result and not target.classes
    if (name not in BY_CLASS and target.shape == result) or soft:
        return
    if name in BY_CLASS and target.shape == result[1:] and target.classes:
        return
    several = "1 channel" if result[0] == 1 else f"{result[0]} channels"
    if name not in BY_CLASS and not target.label and target.shape[-len(result) + 1 :] == result[1:]:
        more = '; for classes set loss.name = "cross_entropy"' if result[0] > 1 else ""
        fix = f'masks need {several}, with data.mask = "channels"{more}'
    elif target.label and len(result) > 1:
        fix = "give masks (data.masks), or a model with one result for the whole image"
    elif len(result) == 1 and not target.label:
        fix = "give labels (data.table), or a model with a result for every position"
    elif target.shape == result[1:]:
        fix = 'classes are whole numbers: set data.mask = "classes"'
    else:
        fix = "let the model return its result at the size of the targets, as by F.interpolate"
    raise ConfigError(f'loss.name = "{name}" cannot compare results of shape {result} with {target}: {fix}')


def score_names(
    kind: Kind, result: Shape | None, target: TargetForm | None, classes: Sequence[str]
) -> list[str] | None:
    """The scores that a validation of results of a kind may have; None where that is not known.

    >>> score_names("classes", (2, 8, 8), TargetForm((8, 8), classes=True), ["background", "tissue"])
    ['loss', 'accuracy', 'mean_iou', 'mean_dice', 'iou/background', 'iou/tissue']
    """
    if result is None or target is None:
        return None
    named = [f"iou/{name}" for name in classes] if len(classes) in names_wanted(kind, result)[-1:] else []
    if kind == "classes":
        return ["loss", *CLASS_SCORES, *named]
    # Whether masks hold yes and no alone, or values between, their values tell.
    yes_or_no = [*CLASS_SCORES, *named] if kind in ("logits", "probabilities") else []
    return ["loss", *yes_or_no, "absolute_error"]


def names_wanted(kind: Kind, result: Shape) -> list[int]:
    """How many names the classes of a result (K, …) may have; the last number is that of the scores of each.

    A channel alone that says yes or no may be named by one, or by those of no and yes.

    >>> names_wanted("logits", (1, 8, 8)), names_wanted("logits", (3, 8, 8)), names_wanted("values", (3, 8, 8))
    ([1, 2], [3], [])
    """
    if kind in ("values", "unknown"):
        return []
    channels = result[0] if result else 1
    return [1, 2] if kind != "classes" and channels == 1 else [channels]


def check_best(config: Config, known: Sequence[str] | None, domains: Sequence[str]) -> None:
    """Raise if checkpoint.best is not among the scores of validations; those of domains have their name in front."""
    name = config.checkpoint.best.removeprefix("validation/")
    if not name or known is None:
        return
    every = [*known, *(f"{domain}/{score}" for domain in domains for score in known if score != "loss")]
    if name not in every:
        raise ConfigError(
            f'checkpoint.best = "{config.checkpoint.best}" is not a score of this run: choose one of {", ".join(every)}'
        )
