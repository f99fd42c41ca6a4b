"""The text of a first run's TOML file: every table with what it is for, and what a user may want to change in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from textwrap import wrap
from typing import Any

from mural.plans import Plan
from mural.survey.machine_plan import CROPS
from mural.survey.run_facts import (
    FRACTION,
    RunFacts,
    classes_in_words,
    images_in_words,
    masks_in_words,
)
from mural.typed import literal

COLUMN, WIDTH = 40, 112
EPOCHS, PATIENCE, RATE = 50, 10, 1e-3
REMARKS = {
    "data": "GPUs that share a batch",
    "spatial": "GPUs that share an image, along each dim",
    "stream": "tiles: an image does not fit at once",
    "recompute": "blocks that backward computes again, to save memory",
    "offload": "what rests in the host's memory",
}
"""What fields of a plan are."""


def run_text(facts: RunFacts) -> str:
    """The file."""
    tables = (head, model, data, validation, augment, loss, training, plan)
    return "\n\n".join("\n".join(table(facts)) for table in tables) + "\n"


def entry(key: str, value: Any, remark: str = "") -> str:
    """A line of the file, with a remark where there is one.

    >>> entry("batch", 1, "images of a step")
    'batch = 1                               # images of a step'
    """
    line = f"{key} = {literal(value)}"
    return f"{line:<{COLUMN}}# {remark}" if remark and len(line) < COLUMN else f"{line}  # {remark}" if remark else line


def hint(key: str, value: Any, remark: str) -> str:
    """A line that is to be uncommented.

    >>> hint("skip_bad", True, "leave out bad files")
    '# skip_bad = true                       # leave out bad files'
    """
    line = f"# {key} = {literal(value)}"
    return f"{line:<{COLUMN}}# {remark}" if len(line) < COLUMN else f"{line}  # {remark}"


def title(name: str, remark: str) -> str:
    """The line with which a table begins."""
    return f"{f'[{name}]':<{COLUMN}}# {remark}"


def comment(text: str, first: str = "") -> list[str]:
    """A text as lines of comment; `first` comes before it."""
    return [f"# {line}" for line in wrap(f"{first}{text}", WIDTH, subsequent_indent=" " * len(first))]


def head(facts: RunFacts) -> Iterator[str]:
    """What the file is about."""
    yield from comment(f"Written by `mural init {facts.folder}`. Start it with: mural train {facts.output}")
    yield from comment("Paths are relative to where you start it. `mural train --help` lists every key.")
    yield "#"
    yield from comment(images_in_words(facts.survey), "Images: ")
    if facts.survey.masks is not None:
        yield from comment(masks_in_words(facts.survey), "Masks: ")
    if facts.odd:
        yield from ("#", "# What is odd:")
    for remark in facts.odd:
        yield from comment(remark, "- ")
    yield ""
    yield entry("folder", str(facts.run), "what the run writes; take another one for another run")


def model(facts: RunFacts) -> Iterator[str]:
    """[model]."""
    yield title("model", 'any callable that returns an nn.Module: "package.module:name", "file.py:name"')
    yield entry("factory", facts.model.factory)
    wide = "width: channels of the first level" if "width" in facts.model.arguments else ""
    yield entry("arguments", facts.model.arguments, wide)
    if facts.model.made is None:
        yield from comment("; ".join(facts.model.odd), "TO DO: ")


def data(facts: RunFacts) -> Iterator[str]:
    """[data]."""
    yield title("data", "images, each with its " + ("class" if facts.layout.classes else "mask"))
    for key, value in facts.training.items():
        table = f"images with their {'classes' if facts.layout.classes else 'masks'}, one pair a line"
        yield entry(key, value, {"images": "paired with the masks by name", "table": table}.get(key, ""))
    sample = (
        "Values in a sample of the masks" if facts.survey.masks and facts.survey.masks.sampled else "Values of masks"
    )
    yield from comment(classes_in_words(facts), "Images of each class: " if facts.layout.classes else f"{sample}: ")
    if facts.classes.labels:
        yield entry("labels", facts.classes.labels, "value in the mask = class")
    if facts.layout.classes:
        yield entry("classes", facts.layout.classes)
    else:
        names = ["background", *(f"class {n}" for n in range(1, min(4, facts.classes.count)))]
        yield hint("classes", names, "names for the scores, one for each class")
    yield entry("batch", facts.plan.batch, "images of a step; more than one need one size, or a crop")
    if facts.scaling.scale != "range":
        yield entry("scale", facts.scaling.scale, facts.scaling.why)
    if facts.scaling.mean:
        yield entry("mean", facts.scaling.mean, "of each channel")
        yield entry("std", facts.scaling.std)
    yield from padding(facts)
    crop = [min(n, CROPS[len(facts.survey.largest)]) for n in facts.survey.largest]
    if any(n < extent for n, extent in zip(crop, facts.survey.largest, strict=True)):
        yield hint("crop", crop, "random boxes of this size instead of whole images")
    yield hint("skip_bad", True, "leave out files that cannot be read, instead of ending the run")


def padding(facts: RunFacts) -> Iterator[str]:
    """What is said about sizes that the model's strides do not divide."""
    if facts.model.multiple > 1:
        yield entry("multiple", facts.model.multiple, "images are padded to multiples; padding counts in no loss")
    elif facts.model.stride > 1 and not facts.layout.classes:
        yield hint("multiple", facts.model.stride, "pads images to the model's total stride, which it does not need")


def validation(facts: RunFacts) -> Iterator[str]:
    """[validation]."""
    yield title("validation", "images that are not trained on, after every epoch")
    if facts.validation:
        yield from (entry(key, value) for key, value in facts.validation.items())
    elif facts.held_out:
        yield entry("fraction", FRACTION, f"{facts.held_out} of {len(facts.survey.training)} images, drawn by the seed")
    else:
        yield hint("fraction", FRACTION, "there is one image: nothing can be held out")
    if not facts.layout.classes:
        yield hint("write", "tiff", "predictions of these images as files")


def augment(facts: RunFacts) -> Iterator[str]:
    """[augment]."""
    natural = bool(facts.layout.classes) or len(facts.survey.largest) == 3
    yield title("augment", "random changes of training images")
    line = hint if natural else entry
    yield line("flips", True, "only where left and right, up and down mean the same")
    yield line("rotations", True, "by quarter turns")


def loss(facts: RunFacts) -> Iterator[str]:
    """[loss]."""
    yield title("loss", "also dice, or your own: file.py:function")
    yield entry("name", "cross_entropy")
    ignored = {} if facts.classes.ignored is None else {"ignore_index": facts.classes.ignored}
    if ignored:
        yield entry("arguments", ignored, "positions with this value count in no loss")
    if facts.classes.rare and not facts.layout.classes:
        weighted = {"weight": facts.classes.weights, **ignored}
        yield from comment('For rare classes: name = "dice", or cross_entropy with weights:')
        yield f"# {entry('arguments', weighted)}"


def training(facts: RunFacts) -> Iterator[str]:
    """[optimizer], [train], [checkpoint]."""
    yield "[optimizer]"
    yield entry("name", "AdamW")
    yield entry("lr", RATE, "the first thing to try others of")
    yield ""
    yield "[train]"
    yield entry("epochs", EPOCHS, "passes over the images")
    if facts.held_out:
        score = "accuracy" if facts.layout.classes else "mean_iou"
        yield entry("stop_after", PATIENCE, "validations without a better one")
        yield ""
        yield title("checkpoint", "the newest few are kept, and the best")
        yield entry("best", score, "which one `mural predict` takes")


def plan(facts: RunFacts) -> Iterator[str]:
    """[plan]."""
    yield title("plan", f"for this machine: {facts.machine}")
    yield from comment(facts.plan.why)
    found, default = facts.plan.plan, Plan()
    changed = {
        f.name: getattr(found, f.name) for f in fields(found) if getattr(found, f.name) != getattr(default, f.name)
    }
    yield from (entry(name, value, REMARKS.get(name, "")) for name, value in changed.items())
    if "stream" not in changed and not facts.layout.classes:
        tile = [1024, 1024] if len(facts.survey.largest) == 2 else [128] * len(facts.survey.largest)
        yield hint("stream", tile, "goes through images in tiles, for images of any size")
    if facts.machine.gpus:
        yield hint("precision", "bfloat16", "faster, in less memory, and less exact")
