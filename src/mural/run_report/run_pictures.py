"""The pictures of a report: some images with their masks, what the run's model says of them, and the difference."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mural.data import Source
from mural.data import open as open_source
from mural.data.image_sample import is_path, label_of, opened, sample_at
from mural.data.source import level_of
from mural.errors import DataError
from mural.report.class_maps import Panel, PictureRow, class_legend, class_panels, value_panels
from mural.report.run_page import Gallery
from mural.run_report.coarse_views import Told, View, boxes_of, coarse_labels, coarse_values, view_of
from mural.run_report.predicted_samples import PredictedSample, given_samples, shown, written_samples
from mural.run_report.run_curves import class_names, class_scores, label_names
from mural.run_report.run_history import RunHistory, labels_images
from mural.survey.sampled_boxes import spread
from mural.train.configured_samples import Split
from mural.train.prediction_files import PREDICTIONS
from mural.train.result_meaning import Meaning, meaning_of

MOST = 4
"""Images that are shown."""
MOST_LABELS = 8
"""Labels that are shown of each."""
STRETCH = (0.01, 0.99)
"""The parts of an image's values that become black and white, if they are not those of a photograph."""
Progress = Callable[[str, int, int], None]
"""What is told of long work: what it is, how much of it is done, and of how much."""


@dataclass(frozen=True)
class Maps:
    """A picture's content: pixels, and classes or values of mask and prediction, (H, W)."""

    view: View
    image: NDArray[np.uint8]
    mask: Tensor | None
    predicted: Tensor
    channels: int = 1
    """Of the prediction: the first is shown."""
    label: str = ""
    """What the prediction says yes or no to, where a model tells several labels."""


def gallery(
    run: RunHistory, splits: Mapping[str, Split], predictions: Path | None, step: int | None, progress: Progress
) -> Gallery:
    """The pictures of a run, of predictions in a folder or of those that its validations wrote."""
    found = written_samples(run, splits, step) if predictions is None else given_samples(run, splits, predictions)
    if not found:
        return how_to_get_some(run, splits)
    chosen, remarks, maps = shown(found, MOST), list[str](), list[tuple[PredictedSample, Maps]]()
    for number, one in enumerate(chosen):
        try:
            some = read(run, one, lambda done, of, n=number: progress("pictures", n * of + done, len(chosen) * of))
            maps += [(one, content) for content in some[:MOST_LABELS]]
            remarks += [f"Of {one.file.name}, the first {MOST_LABELS} of {len(some)} labels."] * (
                len(some) > MOST_LABELS
            )
        except DataError as error:
            remarks.append(f"Not shown: {error}")
    contents = [content for _, content in maps]
    classes = count_classes(run, contents)
    rows = [row(one, content, classes) for one, content in maps]
    if found[0].other_run:
        remarks.insert(0, f"These predictions are those of another run: {found[0].other_run}")
    if not classes:
        return Gallery(rows, (), remarks)
    whole = ["no", "yes"] if any(content.label for content in contents) else class_names(run, classes)
    masks = [content.mask for content in contents if content.mask is not None]
    unlabelled = any(bool(((mask < 0) | (mask >= classes)).any()) for mask in masks)
    return Gallery(rows, class_legend(whole, unlabelled, bool(masks)), remarks)


def how_to_get_some(run: RunHistory, splits: Mapping[str, Split]) -> Gallery:
    """What to type for pictures; nothing where there cannot be any."""
    held = [split.held_out for split in splits.values() if split.held_out is not None]
    if not splits:
        return Gallery((), (), ["There are no predictions to show."])
    if run.config.targets.images:
        return Gallery((), (), ['There are no predictions: validation.write = "tiff" has validations write them.'])
    source = next(iter(splits.values()))
    if labels_images(splits):
        return Gallery(
            (),
            (),
            ["The model says one thing of a whole image: `mural predict` writes a table of it, and no maps."],
        )
    if run.manifest is None:
        return Gallery((), (), ["There are no predictions, and no checkpoint that could make some."])
    one = held[0] if held else source.training
    samples = [sample_at(one, index) for index in spread(range(len(one)), MOST)]
    if not all(is_path(sample.image) for sample in samples):
        return Gallery((), (), ['There are no predictions: validation.write = "tiff" has validations write them.'])
    out = run.folder / PREDICTIONS / "report"
    images = [f"\\\n    {shlex.quote(str(Path(sample.image).resolve()))}" for sample in samples]
    words = ["mural predict", shlex.quote(str(run.folder)), *images, "\\\n    --out", shlex.quote(str(out))]
    command = f"{' '.join(words)}\n{shlex.join(['mural', 'report', str(run.folder), '--predictions', str(out)])}"
    kind = "held-out" if held else "training"
    return Gallery((), (), [f"There are no predictions yet. These lines make some, of {kind} images:"], command)


# -- what is read ------------------------------------------------------------------------------------------------------


def read(run: RunHistory, one: PredictedSample, told: Callable[[int, int], None]) -> list[Maps]:
    """The pixels of a picture; of a model that tells several labels, of one for each."""
    level, target = run.config.data.level, one.sample.target
    with ExitStack() as stack:
        image = stack.enter_context(opened(one.sample.image, one.sample.name, open_source))
        predicted = stack.enter_context(open_source(one.file))
        extents = level_of(image, level if one.sample.target is not None or level < len(image.levels) else 0).shape[1:]
        sources = [image, predicted]
        mask: Source | None = None
        if target is not None and label_of(target) is None:
            mask = stack.enter_context(opened(target, f"the mask of {one.sample.name}", open_source, len(extents)))
            sources.append(mask)
        if any(len(source.shape) != len(extents) + 1 for source in sources):
            raise DataError(f"{one.file}: its dims are not those of {one.sample.name}", str(one.file))
        view = view_of(extents, sources)
        counted = count_up(told, sum(len(boxes_of(source, view)[1]) for source in sources))
        shade = coarse_values(image, view, 3 if image.shape[0] >= 3 else 1, counted)
        photo = photograph(shade, image.dtype)
        meaning, channels = meaning_in(run, predicted), predicted.shape[0]
        each = channels if meaning.binary else 1
        truth: Tensor | None = None
        if mask is not None:
            truth = renamed(coarse_labels(mask, view, min(each, mask.shape[0]), counted), run.config.data.labels)
            truth = (truth >= 0.5).long() if meaning.binary and truth.is_floating_point() else truth
        first = None if truth is None else truth[0]
        if meaning.kind == "classes" and channels > 1:  # scores, of a run before labels were written alone
            return [Maps(view, photo, first, coarse_labels(predicted, view, channels, counted).argmax(0))]
        found = coarse_labels(predicted, view, each, counted)
        if each == 1:
            return [Maps(view, photo, first, found[0], channels)]
        names = label_names(run, channels)
        masks = list(truth) if truth is not None and len(truth) == channels else [None] * channels
        each_label = zip(names, masks, found, strict=True)
        return [Maps(view, photo, one_mask, yes, label=name) for name, one_mask, yes in each_label]


def meaning_in(run: RunHistory, predicted: Source) -> Meaning:
    """What the numbers of a prediction's file are: values, where they are not the labels that the loss asks for."""
    try:
        found = meaning_of(run.config, predicted.shape[0])
    except Exception:  # whatever a loss of the user's own may raise, which may not be found from here
        found = Meaning("classes" if run.config.data.mask == "classes" else "unknown")
    return Meaning("values") if found.binary and predicted.dtype.is_floating_point else found


def count_up(told: Callable[[int, int], None], of: int) -> Told:
    """What counts the boxes that were read, of so many, and tells it."""
    done = 0

    def again() -> None:
        nonlocal done
        done += 1
        told(done, of)

    return again


def renamed(labels: Tensor, names: Mapping[int, int]) -> Tensor:
    """Labels as the run takes them: data.labels gives some of them other values.

    >>> renamed(torch.tensor([0, 255]), {255: 1}).tolist()
    [0, 1]
    """
    found = labels.clone() if labels.is_floating_point() else labels.long()
    for before, after in names.items():
        found[labels == before] = after
    return found


def photograph(values: Tensor, stored: torch.dtype) -> NDArray[np.uint8]:
    """Pixels (C, H, W) as (H, W, 3): bytes as they are, others stretched from their lowest to their highest."""
    if stored != torch.uint8:
        flat = values.flatten().nan_to_num()
        low, high = torch.quantile(flat, torch.tensor(STRETCH, dtype=flat.dtype)).tolist()
        values = (values.nan_to_num() - low) / max(high - low, 1e-12) * 255
    colours = values if values.shape[0] == 3 else values[:1].expand(3, -1, -1)
    return colours.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


# -- what is shown -----------------------------------------------------------------------------------------------------


def count_classes(run: RunHistory, maps: Sequence[Maps]) -> int:
    """How many classes the predictions tell apart; 0 if they hold values."""
    if any(content.predicted.is_floating_point() for content in maps) or not maps:
        return 0
    scored = class_scores(run.of("validation")).values()
    if any(content.label for content in maps):
        return 2
    seen = max(int(content.predicted.long().max()) + 1 for content in maps)
    return max([2, seen, len(run.config.data.classes), *scored])


def row(one: PredictedSample, content: Maps, classes: int) -> PictureRow:
    """The panels of an image, with a caption."""
    words = [f"{one.domain}: {one.part}" if one.domain else one.part, content.view.words]
    words += [f"predicted after step {one.step}"] if one.step else []
    words += [f"channel 0 of {content.channels}"] if content.channels > 1 else []
    words[:0] = [f"label {content.label}"] if content.label else []
    panels: list[Panel]
    if not classes:
        truth = None if content.mask is None else content.mask.double().numpy()
        panels = value_panels(content.image, truth, content.predicted.double().numpy())
    else:
        predicted = content.predicted.long()
        truth = None if content.mask is None else content.mask.long()
        panels = class_panels(content.image, None if truth is None else truth.numpy(), predicted.numpy(), classes)
        if truth is not None and bool((known := (truth >= 0) & (truth < classes)).any()):
            words.append(f"{float((truth == predicted)[known].float().mean()):.1%} of the pixels shown agree")
    return PictureRow(Path(one.sample.name).name, "; ".join(words), panels)
