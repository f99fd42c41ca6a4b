"""The first run on a folder of images: surveyed, planned for this machine, and written as a file for `mural train`."""

from __future__ import annotations

import csv
import glob
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mural.data.sets.pairing import keyed, listed, matched, pair
from mural.errors import ConfigError, DataError
from mural.survey.data_survey import DataSurvey, surveyed
from mural.survey.file_patterns import Patterns, patterns_of
from mural.survey.folder_layout import FolderLayout, Pair, layout_of
from mural.survey.image_values import scaling_of
from mural.survey.machine_plan import planned, this_machine
from mural.survey.mask_classes import MaskClasses, classes_of
from mural.survey.model_choice import Task, chosen_model
from mural.survey.run_facts import RunFacts, held_out_of
from mural.survey.run_template import run_text
from mural.survey.sampled_boxes import Progress
from mural.train.config import Config


@dataclass(frozen=True)
class FirstRun:
    """What was written, and what was found."""

    path: Path
    facts: RunFacts
    tables: tuple[Path, ...] = ()
    """CSV files next to it."""


def silent(_what: str, _done: int, _of: int) -> None:
    """Say nothing."""


def write_first_run(
    folder: str | Path,
    output: str | Path = "run.toml",
    *,
    images: Sequence[str] = (),
    masks: Sequence[str] = (),
    model: str = "",
    arguments: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> FirstRun:
    """Write a TOML file that `mural train` runs, from what is in a folder of images with masks, or of classes.

    Paths in it are relative to the working directory, as `folder` is. Where globs cannot name the pairs that can be
    used, a CSV file next to it does. `images` and `masks` name files whose names do not say what they are; `model` is
    a callable, as "package.module:name", with some `arguments`. What is there is not replaced, unless `overwrite`.
    """
    place, out = Path(folder), Path(output)
    tables = out.with_suffix(".csv"), out.with_name(f"{out.stem}-validation.csv")
    check_free((out, *tables), overwrite)
    if not place.is_dir():
        raise DataError(f"{place}: there is no such folder")
    given = [tuple(within(place, pattern) for pattern in some) for some in (images, masks)]
    layout = named_layout(*given) if images or masks else layout_of(place)
    facts = facts_of(place, out, layout, model, arguments or {}, progress)
    training, validation = facts.survey.training, facts.survey.validation
    facts = replace(
        facts, training=names_of(training, tables[0], *given), validation=names_of(validation, tables[1], *given)
    )
    text = run_text(facts)
    Config.of(tomllib.loads(text))
    return written(facts, text, tables)


def check_free(files: Sequence[Path], overwrite: bool) -> None:
    """Raise if files are there already."""
    there = [str(file) for file in files if file.exists()]
    if there and not overwrite:
        raise ConfigError(f"already there: {listed(there)}: give --overwrite to replace, or --output another.toml")


def written(facts: RunFacts, text: str, tables: Sequence[Path]) -> FirstRun:
    """Write the file, and tables where it names some."""
    named = [table for table, names in zip(tables, (facts.training, facts.validation), strict=True) if "table" in names]
    try:
        facts.output.parent.mkdir(parents=True, exist_ok=True)
        for table, pairs in zip(tables, (facts.survey.training, facts.survey.validation), strict=True):
            if table in named:
                write_table(table, pairs)
        facts.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or facts.output} cannot be written: {error.strerror}") from error
    return FirstRun(facts.output, facts, tuple(named))


# -- facts -------------------------------------------------------------------------------------------------------------


def facts_of(
    folder: Path, output: Path, layout: FolderLayout, model: str, arguments: Mapping[str, Any], progress: Progress
) -> RunFacts:
    """All that is known about a folder and a run on it, but for how the run names its files."""
    survey = surveyed(layout, progress)
    machine = this_machine()
    classes = folder_classes(layout, survey)
    task = Task(survey.channels, tuple(sorted(survey.sizes)), classes.count, bool(layout.classes), not machine.gpus)
    progress("model", 0, 2)
    choice = chosen_model(task, model, arguments)
    progress("plan", 1, 2)
    facts = RunFacts(
        folder, output, free_run(folder, output), layout, survey, classes, scaling_of(survey.dtype, survey.values),
        machine, choice, planned(machine, choice, task, len(survey.pairs) - held_out_of(survey)),
    )  # fmt: skip
    progress("plan", 2, 2)
    return facts


def folder_classes(layout: FolderLayout, survey: DataSurvey) -> MaskClasses:
    """The classes of masks, or those that folders stand for."""
    if survey.masks is None:
        return MaskClasses(len(layout.classes))
    return classes_of(survey.masks, [*survey.endings(1)])


def free_run(folder: Path, output: Path) -> Path:
    """A folder for the run that is not there: a run that finds one resumes what is in it."""
    name = output.stem if output.stem != "run" else folder.resolve().name or "run"
    found, number = Path("runs") / name, 2
    while found.exists():
        found, number = Path("runs") / f"{name}-{number}", number + 1
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def named_layout(images: Sequence[str], masks: Sequence[str]) -> FolderLayout:
    """The layout of files that a user names, paired as training pairs them."""
    if not images or not masks:
        raise ConfigError("--images and --masks belong together: give both")
    found = matched(keyed(images, "--images"), keyed(masks, "--masks"))
    if not found.pairs:
        pair(images, masks)  # says why
    return FolderLayout(found.pairs, images_alone=found.images_alone, masks_alone=found.masks_alone)


def within(folder: Path, pattern: str) -> str:
    """A pattern as it is, or below a folder if it only finds something there."""
    below = str(folder / pattern)
    return below if not glob.glob(pattern, recursive=True) and glob.glob(below, recursive=True) else pattern


def names_of(pairs: Sequence[Pair], table: Path, images: Patterns, masks: Patterns) -> dict[str, Any]:
    """How a table of the configuration names the files of some pairs: by the user's own globs, by others, by a CSV."""
    if not pairs:
        return {}
    globs = patterns_of(pairs, images, masks)
    if globs is None:
        return {"table": str(table)}
    return {name: some[0] if len(some) == 1 else some for name, some in zip(("images", "masks"), globs, strict=True)}


def write_table(path: Path, pairs: Sequence[Pair]) -> None:
    """Write pairs to a CSV file; paths are relative to it, unless they are absolute."""

    def name(file: Path) -> str:
        return str(file) if file.is_absolute() else Path(os.path.relpath(file, path.parent)).as_posix()

    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("image", "mask" if isinstance(pairs[0][1], Path) else "label"))
        for image, target in pairs:
            rows.writerow((name(image), name(target) if isinstance(target, Path) else target))
