"""`mural report`: the page of a run, from its folder to an HTML file."""

from __future__ import annotations

import os
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path

from mural.data.image_sample import sample_at
from mural.errors import CheckpointError, ConfigError
from mural.prediction.trained_run import trained_run
from mural.report.run_page import RunPage, html, is_report
from mural.run_report.predicted_step import predicted_step
from mural.run_report.run_curves import charts
from mural.run_report.run_description import changed_toml, description
from mural.run_report.run_history import RunHistory, read_history
from mural.run_report.run_pictures import Progress, gallery
from mural.run_report.run_speed import tables
from mural.run_report.run_verdict import headline
from mural.train.configured_samples import Split, datasets
from mural.train.start_record import RESOLVED

NAME = "report.html"
HEAD = 2**16
"""Characters of a page that tell what it is."""


@dataclass(frozen=True)
class WrittenReport:
    """A report, and what could not be read for it."""

    path: Path
    headline: str
    damaged: int


def write_report(
    run: str | Path,
    out: str | Path | None = None,
    predictions: str | Path | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = lambda what, done, of: None,
) -> WrittenReport:
    """Write what a run did to one HTML page: `report.html` in its folder, unless `out` names another file.

    Pictures are those of predictions that its validations wrote, or of a folder of `mural predict`. `progress` is told
    what is read. A file of `out` that is not a report is replaced only with `overwrite`.
    """
    history = read_history(Path(os.path.abspath(run)))
    path = (Path(run) / NAME if out is None else Path(out)).absolute()
    if out is not None:
        check_place(path, overwrite)
    given = None if predictions is None else Path(predictions).absolute()
    made = page_of(history, given, progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(html(made), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return WrittenReport(path if out is None else Path(out), made.headline.words, history.damaged)


def check_place(path: Path, overwrite: bool) -> None:
    """Raise unless a report may be written to a file."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder: give the name of a file in it, as {path / NAME}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: a report is an HTML page: give a name that ends with .html")
    if path.exists() and not overwrite:
        with path.open(encoding="utf-8", errors="replace") as file:
            if not is_report(file.read(HEAD)):
                raise ConfigError(f"--out {path} is there and is not a report: choose another name, or add --overwrite")


def page_of(run: RunHistory, predictions: Path | None, progress: Progress) -> RunPage:
    """Everything on the page of a run; paths of its configuration are relative to where it was started."""
    with chdir(run.directory):
        splits, why = samples_of(run)
        progress("pictures", 0, 1)
        shown = gallery(run, splits, predictions, chosen_step(run), progress)
        if why:
            shown = replace(shown, remarks=[f"The run's own images are not found from here: {why}", *shown.remarks])
        progress("prediction", 0, 1)
        predicted = predicted_step(run, splits)
        return RunPage(
            title=f"Run {run.folder.name}",
            headline=headline(run),
            charts=charts(run),
            resumed=run.resumed,
            gallery=shown,
            speed=tables(run, predicted),
            about=description(run, splits),
            changed=changed_toml(run.config),
            config=(run.folder / RESOLVED).read_text(encoding="utf-8"),
        )


def samples_of(run: RunHistory) -> tuple[dict[str, Split], str]:
    """The samples of a run; where they are not found from here, none, and why."""
    try:
        found = datasets(run.config)
        for split in found.values():
            sample_at(split.training, 0)
    except Exception as error:  # whatever a dataset of the user's own may raise: a report goes without images
        return {}, str(error)
    return found, ""


def chosen_step(run: RunHistory) -> int | None:
    """The step whose predictions are shown: the one that `mural predict` takes, or that of the best validation."""
    try:
        return trained_run(run.folder).step
    except (ConfigError, CheckpointError):
        return run.best.step if run.best is not None else None
