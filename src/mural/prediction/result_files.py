"""The files of predictions: where each image's go, which are there already, and whose they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mural.data.sets.pairing import expand
from mural.errors import ConfigError, DataError
from mural.train.prediction_files import SUFFIX, file_stems

ResultFormat = Literal["auto", "tiff", "zarr", "nifti"]
RECORD = "predictions.json"
PROBABILITIES = "probabilities"


@dataclass(frozen=True)
class ImageFiles:
    """An image, and the files that its prediction is written to."""

    image: Path
    labels: Path
    probabilities: Path | None

    @property
    def complete(self) -> bool:
        """Whether all are there: a file takes its name when it is complete."""
        return self.labels.exists() and (self.probabilities is None or self.probabilities.exists())


def image_files(
    images: str | Path | Sequence[str | Path], out: Path, kind: ResultFormat, probabilities: bool
) -> list[ImageFiles]:
    """The images of globs, folders or paths, each once, with the files of their predictions."""
    if kind not in ("auto", *SUFFIX):
        raise ConfigError(f'format = "{kind}" is not one of auto, {", ".join(SUFFIX)}')
    patterns = [images] if isinstance(images, (str, Path)) else list(images)
    paths = list(dict.fromkeys(path for pattern in patterns for path in expand(pattern, "images")))
    if not paths:
        raise DataError("there is nothing to predict: give images, as in slides/*.tif")
    found: list[ImageFiles] = []
    for path, stem in zip(paths, file_stems([str(path) for path in paths]), strict=True):
        name = stem + SUFFIX[suggested(path) if kind == "auto" else kind]
        found.append(ImageFiles(path, out / name, out / PROBABILITIES / name if probabilities else None))
    taken = {path.resolve() for path in paths}
    for one in found:
        if one.labels.resolve() in taken:
            raise ConfigError(f"the prediction of {one.image} would take the place of an image: choose another folder")
    return found


def suggested(path: Path) -> str:
    """The format of a prediction, by the name of its image.

    >>> suggested(Path("a.nii")), suggested(Path("b.ome.zarr")), suggested(Path("c.png"))
    ('nifti', 'zarr', 'tiff')
    """
    name = path.name.lower()
    return "nifti" if name.endswith((".nii", ".nii.gz")) else "zarr" if ".zarr" in name else "tiff"


def claim(out: Path, run: Path, step: int, overwrite: bool) -> None:
    """Make the folder, and note whose predictions it holds; those of another model are not mixed with them."""
    about = {"run": str(run.resolve()), "step": step}
    record = out / RECORD
    try:
        out.mkdir(parents=True, exist_ok=True)
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else about
        if known != about and not overwrite:
            raise ConfigError(
                f"{out} holds predictions by step {known.get('step')} of {known.get('run')}, and these would be by "
                f"step {step} of {run}: choose another folder, or overwrite them"
            )
        record.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the folder {out} cannot be written: {error.strerror}") from error
