"""What the folder of a run tells: its configuration, its starts, its journal, and how it ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mural.checkpoint.files import read_manifest
from mural.checkpoint.folder import step_path, steps_in
from mural.checkpoint.manifest import Manifest
from mural.data.image_sample import label_of, sample_at
from mural.errors import CheckpointError, ConfigError
from mural.prediction.trained_run import config_in
from mural.train import status as run_status
from mural.train.best import Best, best_of, watched
from mural.train.config import Config
from mural.train.configured_samples import Split
from mural.train.journal import ABOUT, METRICS, read_journal
from mural.train.start import CHECKPOINTS
from mural.train.start_record import StartRecord, starts_in

Line = Mapping[str, Any]
"""A line of the journal."""


@dataclass(frozen=True)
class RunHistory:
    """A run, as far as its folder tells."""

    folder: Path
    config: Config
    status: Mapping[str, Any]
    lines: Sequence[Line]
    damaged: int
    """Lines of the journal that could not be read."""
    starts: Sequence[StartRecord]

    def of(self, kind: str) -> list[Line]:
        """The lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def state(self) -> str:
        """How the run stands, as its status says; "gone" if the process that it names is not there any more."""
        found = str(self.status.get("state", ""))
        here = self.status.get("host") == socket.gethostname()
        return "gone" if found == "running" and here and not is_alive(self.status.get("pid")) else found

    @property
    def step(self) -> int:
        """The last update that is known of."""
        return max([int(self.status.get("step", 0)), *(int(line["step"]) for line in self.lines)])

    @property
    def total(self) -> int:
        """The update with which the run ends; 0 where that is not known."""
        if self.starts:
            return self.starts[-1].total
        return self.step if self.state == "finished" else self.config.train.steps

    @cached_property
    def best(self) -> Best | None:
        """The best validation by the score that the run is judged by, or by the loss; None if nothing was held out."""
        seen = [(line["step"], scores_of(line)) for line in self.of("validation")]
        judged = self.config
        if not watched(judged):
            judged = replace(judged, checkpoint=replace(judged.checkpoint, best="loss"))
        try:
            return best_of(seen, judged)
        except ConfigError:  # there is no such score: the run itself has failed of it
            return None

    @property
    def resumed(self) -> list[int]:
        """The steps at which the run was started again."""
        return [start.step for start in self.starts[1:]]

    @cached_property
    def manifest(self) -> Manifest | None:
        """What the newest checkpoint says of itself."""
        folder = self.folder / CHECKPOINTS
        steps = steps_in(folder)
        try:
            return read_manifest(step_path(folder, steps[-1])) if steps else None
        except CheckpointError:
            return None

    @property
    def directory(self) -> Path:
        """Where the run was started, to which the paths of its configuration are relative; else where this process is.

        An old run did not note it: then it is above its folder, by as much as the configuration says.
        """
        given, whole = self.config.folder, self.folder.resolve()
        above = whole.parents[len(given.parts) - 1] if is_below(given, whole) else Path.cwd()
        noted = [Path(start.directory) for start in self.starts[-1:]]
        return next((path for path in (*noted, above) if path.is_dir()), Path.cwd())


def read_history(folder: Path) -> RunHistory:
    """The history of the run in a folder; an error where there is none."""
    config = config_in(folder)
    status = run_status.read(folder / run_status.FILE)
    found, damaged = read_journal(folder)
    lines = [line for line in found if isinstance(line.get("loss"), float) and isinstance(line["time"], (int, float))]
    damaged += len(found) - len(lines)
    if not lines:
        what = f"every line of it is damaged ({damaged})" if damaged else "it has no lines yet"
        told = f" The run {status['state']}: {str(status['error']).splitlines()[0]}" if status.get("error") else ""
        raise ConfigError(
            f"{folder / METRICS} has nothing to report: {what}. A run writes one every log.every = "
            f"{config.log.every} updates, and after each validation.{told}"
        )
    return RunHistory(folder, config, status, lines, damaged, starts_in(folder))


def labels_images(splits: Mapping[str, Split]) -> bool:
    """Whether a run's images have labels, so that its model gives no maps."""
    return any(label_of(sample_at(split.training, 0).target) is not None for split in splits.values())


def scores_of(line: Line) -> dict[str, Any]:
    """What a validation found."""
    return {key: value for key, value in line.items() if key not in ABOUT}


def is_alive(pid: Any) -> bool:
    """Whether a process of that number runs on this machine."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, TypeError):
        return False
    return True


def is_below(folder: Path, whole: Path) -> bool:
    """Whether a path ends as a relative one does.

    >>> is_below(Path("runs/first"), Path("/data/runs/first")), is_below(Path("runs/first"), Path("/data/first"))
    (True, False)
    """
    return not folder.is_absolute() and whole.parts[-len(folder.parts) :] == folder.parts
