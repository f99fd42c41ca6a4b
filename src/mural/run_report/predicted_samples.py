"""Which images of a run have a prediction in a file, written by its validations or by `mural predict`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mural.data import Dataset, Sample
from mural.data.image_sample import is_path, name_at, sample_at
from mural.errors import ConfigError
from mural.prediction.result_files import RECORD
from mural.run_report.run_history import RunHistory
from mural.survey.sampled_boxes import spread
from mural.train.configured_samples import SOURCE, Repeated, Split
from mural.train.prediction_files import PREDICTIONS, SUFFIX, file_stems

HELD_OUT, TRAINED_ON, OTHER = "held out", "trained on", "not of this run's data"


@dataclass(frozen=True)
class PredictedSample:
    """A sample with the file of its prediction, and which step's weights made it."""

    sample: Sample
    file: Path
    step: int
    part: str
    """Whether the run held it out, or trained on it."""
    domain: str = ""
    other_run: str = ""
    """The folder of the run that made the prediction, if it is another one."""


def written_samples(run: RunHistory, splits: Mapping[str, Split], step: int | None) -> list[PredictedSample]:
    """The held-out images whose predictions a validation wrote: that after a step, if it did, else the newest."""
    folder = run.folder / PREDICTIONS
    steps = {int(p.name.removeprefix("step-")): p for p in folder.glob("step-*") if p.name[5:].isdigit()}
    if not steps:
        return []
    chosen = step if step in steps else max(steps)
    named = domain_folders(steps[chosen], splits)
    found: list[PredictedSample] = []
    for name, split in splits.items():
        found += in_folder(split.held_out, named.get(name, steps[chosen]), chosen, named.get(name, Path()).name)
    return found


def domain_folders(folder: Path, splits: Mapping[str, Split]) -> dict[str, Path]:
    """The folder of each domain's predictions; none where there is one domain. The source's has a name of its own."""
    if len(splits) == 1:
        return {}
    there = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and not path.suffix}
    source = [path for name, path in there.items() if name not in splits]
    found = {name: there[name] for name in splits if name in there}
    return {**found, SOURCE: source[0]} if source else found


def in_folder(samples: Any, folder: Path, step: int, domain: str = "") -> list[PredictedSample]:
    """The samples that have a file of their name in a folder."""
    if samples is None or not folder.is_dir():
        return []
    stems = file_stems([name_at(samples, index) or f"sample {index}" for index in range(len(samples))])
    found: list[PredictedSample] = []
    for index, stem in enumerate(stems):
        files = [folder / (stem + suffix) for suffix in SUFFIX.values()]
        if file := next((file for file in files if file.exists()), None):
            found.append(PredictedSample(sample_at(samples, index), file, step, HELD_OUT, domain))
    return found


def given_samples(run: RunHistory, splits: Mapping[str, Split], folder: Path) -> list[PredictedSample]:
    """The images that have a prediction in a folder of `mural predict`, those that the run held out first."""
    if not folder.is_dir():
        raise ConfigError(f"--predictions {folder}: there is no such folder. `mural predict` writes one")
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text("utf-8")) if (folder / RECORD).exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--predictions {folder}: {RECORD} in it is damaged: {error}") from error
    parts = {HELD_OUT: [split.held_out for split in splits.values()], TRAINED_ON: [s.training for s in splits.values()]}
    known: dict[str, tuple[Sample, str]] = {}
    for part, several in parts.items():
        for sample in (sample for one in several for sample in listed(one)):
            if is_path(sample.image):
                known.setdefault(str(Path(sample.image).resolve()), (sample, part))
    found = [noted(run, folder / name, about, known) for name, about in record.items() if (folder / name).exists()]
    if not record:
        found = [one for samples in parts[HELD_OUT] for one in in_folder(samples, folder, 0)]
    if not found:
        raise ConfigError(f"--predictions {folder}: it holds no prediction. `mural predict` writes them, with {RECORD}")
    return sorted(found, key=lambda one: (HELD_OUT, TRAINED_ON, OTHER).index(one.part))


def listed(samples: Any) -> Iterable[Sample]:
    """The samples of a dataset of files; those of the user's own are not asked for one by one."""
    plain = samples.samples if isinstance(samples, Repeated) else samples
    return plain if isinstance(plain, Dataset) else ()


def noted(
    run: RunHistory, file: Path, about: Mapping[str, Any], known: Mapping[str, tuple[Sample, str]]
) -> PredictedSample:
    """A prediction that the record of a folder names."""
    image, by = str(about.get("image", "")), str(about.get("run", ""))
    sample, part = known.get(str(Path(image).resolve()), (Sample(image, image), OTHER))
    other = "" if not by or Path(by).resolve() == run.folder.resolve() else by
    return PredictedSample(sample, file, int(about.get("step", 0)), part, other_run=other)


def shown(found: Sequence[PredictedSample], most: int) -> list[PredictedSample]:
    """At most so many of the samples, evenly spread, of each domain as many; all of them held out, if some are."""
    first = [one for one in found if one.part == found[0].part]
    domains = list(dict.fromkeys(one.domain for one in first))
    share = max(1, most // len(domains))
    chosen: list[PredictedSample] = []
    for domain in domains[:most]:
        chosen += spread([one for one in first if one.domain == domain], share)
    return chosen
