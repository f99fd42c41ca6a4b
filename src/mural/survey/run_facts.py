"""What is known about a folder and its first run, and what of it a person should know, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from mural.survey.data_survey import DataSurvey, channels_in_words
from mural.survey.folder_layout import FolderLayout
from mural.survey.folder_layout import in_words as endings_in_words
from mural.survey.image_values import Scaling
from mural.survey.machine_plan import Machine, MachinePlan
from mural.survey.mask_classes import MaskClasses, share_in_words
from mural.survey.model_choice import ModelChoice, in_words

FRACTION = 0.2
"""The part of the images that is held out, where the folder does not say which."""
SHOWN = 3
"""Names of files that a remark lists."""
MOST_CLASSES = 12
"""Classes that are listed with their shares."""


@dataclass(frozen=True)
class RunFacts:
    """A folder, what is in it, and what a first run on it is made of."""

    folder: Path
    output: Path
    run: Path
    layout: FolderLayout
    survey: DataSurvey
    classes: MaskClasses
    scaling: Scaling
    machine: Machine
    model: ModelChoice
    plan: MachinePlan
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How [data] names the files."""
    validation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How [validation] does; nothing where a part of the images is held out, or none."""

    @property
    def held_out(self) -> int:
        """How many images are for validation."""
        return held_out_of(self.survey)

    @property
    def trained_on(self) -> int:
        """How many images are for training."""
        return len(self.survey.pairs) - self.held_out

    @property
    def odd(self) -> tuple[str, ...]:
        """What is unusual about the data, the model and the plan, and what follows from it."""
        return tuple(oddities(self))


def held_out_of(survey: DataSurvey) -> int:
    """How many images are for validation: those of the folder's own split, else a part of all."""
    if survey.validation:
        return len(survey.validation)
    return 0 if len(survey.training) < 2 else max(1, round(FRACTION * len(survey.training)))


def oddities(facts: RunFacts) -> Iterator[str]:
    """What is unusual, the most important first."""
    layout, survey = facts.layout, facts.survey
    yield from (f"left out: {reason}" for reason in [*survey.unusable.values()][:SHOWN])
    if len(survey.unusable) > SHOWN:
        yield f"left out: {files(len(survey.unusable) - SHOWN, 'image')} more, for such reasons"
    for what, partner, alone in (("image", "a mask", layout.images_alone), ("mask", "an image", layout.masks_alone)):
        if alone:
            yield f"left out: {files(len(alone), what)} without {partner}, or with several: {names(alone)}"
    if layout.channels_alone:
        further = files(len(layout.channels_alone), "file")
        yield f"left out: {further} with other channels ({names(layout.channels_alone)}); an image is one file"
    if layout.classes:
        yield f"no masks: the {len(layout.classes)} folders are taken for classes; to name masks: --images, --masks"
    if len(survey.pairs) == 1:
        yield "one image alone: nothing can be held out, so nothing tells when to stop"
    yield from facts.classes.odd
    if facts.classes.rare and not layout.classes and sum(facts.classes.shares):
        rare = ", ".join(map(str, facts.classes.rare[:MOST_CLASSES]))
        yield f"class {rare} has less than 1 % of the positions: see [loss]"
    if survey.values is not None and survey.values.strange:
        yield "images hold values that are not finite (NaN), at which a run ends: replace them"
    if facts.scaling.why:
        yield f"image {facts.scaling.why}"
    yield from facts.model.odd
    yield from facts.plan.odd


def files(count: int, what: str) -> str:
    """A number of things.

    >>> files(1, "image"), files(3, "mask")
    ('1 image', '3 masks')
    """
    return f"{count} {what}{'s' * (count != 1)}"


def names(paths: Sequence[Path]) -> str:
    """The first few names of files."""
    shown = ", ".join(path.name for path in paths[:SHOWN])
    return shown + (", …" if len(paths) > SHOWN else "")


def images_in_words(survey: DataSurvey) -> str:
    """How many images there are, and what they are like."""
    kind = channels_in_words(survey.channels, survey.dtype)
    return f"{len(survey.pairs)} ({endings_in_words(survey.endings(0))}), {kind}, {sizes_in_words(survey.sizes)}"


def sizes_in_words(sizes: Counter[tuple[int, ...]]) -> str:
    """The size of images, or the smallest and the largest.

    >>> sizes_in_words(Counter({(480, 640): 3})), sizes_in_words(Counter({(9, 9): 1, (16, 12): 2}))
    ('480 × 640', '9 × 9 to 16 × 12 (2 sizes)')
    """
    low, high = min(sizes, key=prod), max(sizes, key=prod)
    return in_words(high) if len(sizes) == 1 else f"{in_words(low)} to {in_words(high)} ({len(sizes)} sizes)"


def classes_in_words(facts: RunFacts) -> str:
    """Each value of the masks with how often it occurs; or each folder's images."""
    if facts.layout.classes:
        found = Counter(number for _, number in facts.survey.pairs)
        each = [f"{name}: {found[number]}" for number, name in enumerate(facts.layout.classes)]
    else:
        old = {new: value for value, new in facts.classes.labels.items()}
        each = [
            f"{f'{old[number]} → ' if number in old else ''}{number}: {share_in_words(share)}"
            for number, share in enumerate(facts.classes.shares)
        ]
    return ", ".join(each[:MOST_CLASSES]) + (f", … ({len(each)} classes)" if len(each) > MOST_CLASSES else "")


def masks_in_words(survey: DataSurvey) -> str:
    """What the masks are, and how much of them was looked at."""
    if survey.masks is None:
        return "none"
    types = ", ".join(str(dtype).removeprefix("torch.") for dtype in survey.masks.dtypes)
    share = f"a sample of {survey.masks.positions:,} positions" if survey.masks.sampled else "all of them read"
    return f"{len(survey.pairs)} ({endings_in_words(survey.endings(1))}), {types}, {share}"


def plan_in_words(plan: MachinePlan) -> str:
    """The plan in one line."""
    found = ", ".join(line for line in str(plan.plan).splitlines() if not line.startswith("memory"))
    return f"{found}; batches of {plan.batch}; {plan.why}"


def rows(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """The summary, a name and a text for each line."""
    yield "images", images_in_words(facts.survey)
    if facts.survey.masks is not None:
        yield "masks", masks_in_words(facts.survey)
    yield "classes", classes_in_words(facts)
    yield "split", f"{facts.trained_on} to train on, {facts.held_out} held out for validation"
    if facts.layout.test:
        yield "left out", f"{files(len(facts.layout.test), 'file')} of a test set: for mural predict, after training"
    if facts.layout.others:
        yield "ignored", f"{files(facts.layout.others.total(), 'other file')} ({endings_in_words(facts.layout.others)})"
    arguments = ", ".join(f"{name} = {value!r}" for name, value in facts.model.arguments.items())
    yield "model", f"{facts.model.factory}({arguments})"
    yield "machine", str(facts.machine)
    yield "plan", plan_in_words(facts.plan)
