"""The files of predictions: where each image's go, which are there already, and whose they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mural.data.sets.pairing import expand
from mural.errors import ConfigError, DataError
from mural.train.prediction_files import SUFFIX, file_stems

ResultFormat = Literal["auto", "tiff", "zarr", "nifti"]
Images = str | Path | Sequence[str | Path]
"""Globs, folders or paths."""
RECORD = "predictions.json"
PROBABILITIES = "probabilities"


class ImageResult(Protocol):
    """The result of an image, which may be there already."""

    @property
    def image(self) -> Path:
        """The image."""
        ...

    @property
    def key(self) -> str:
        """What it is called in the record of results."""
        ...

    @property
    def where(self) -> Path:
        """The file of its result."""
        ...

    def exists(self, every: Callable[[Iterable[bool]], bool]) -> bool:
        """Whether all of the result is there, or any of it."""
        ...

    def remove(self) -> None:
        """Remove what is there."""
        ...


@dataclass(frozen=True)
class ImageFiles:
    """An image, and the files that its prediction is written to."""

    image: Path
    labels: Path
    probabilities: Path | None

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [self.labels] if self.probabilities is None else [self.labels, self.probabilities]

    @property
    def key(self) -> str:
        """What the image is called in the record of results."""
        return self.labels.name

    @property
    def where(self) -> Path:
        """The file of its result."""
        return self.labels

    def exists(self, every: Callable[[Iterable[bool]], bool]) -> bool:
        """Whether all of them are there, or any: a file takes its name when it is complete."""
        return every(path.exists() for path in self.paths)

    def remove(self) -> None:
        """Remove what is there of them."""
        for path in self.paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def image_files(images: Images, out: Path, kind: ResultFormat, probabilities: bool) -> list[ImageFiles]:
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


# -- whose they are ----------------------------------------------------------------------------------------------------


class ResultRecord:
    """What predictions.json in a folder says: of which image each file is, and by which checkpoint.

    A file counts only under the same image and checkpoint. It is noted before it is begun, and an older one goes first,
    so that whatever is there under a noted name is what the note says. One process reads and writes it.
    """

    def __init__(self, out: Path, model: Mapping[str, str | int]):
        self.path, self.model = out / RECORD, model
        try:
            out.mkdir(parents=True, exist_ok=True)
            self.known: dict[str, Any] = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
            self._write()
        except OSError as error:
            raise ConfigError(f"the folder {out} cannot be written: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{self.path} is damaged ({error}): choose another folder, or remove it") from error

    def waiting(self, results: Sequence[ImageResult], overwrite: bool) -> list[int]:
        """Numbers of images without a result; raises for one that is of something else, unless it is overwritten."""
        if overwrite:
            return list(range(len(results)))
        for one in results:
            if one.exists(any):
                self._check(one)
        return [number for number, one in enumerate(results) if not one.exists(all)]

    def begin(self, results: Iterable[ImageResult]) -> None:
        """Note what is predicted next."""
        for one in results:
            one.remove()
            self.known[one.key] = self._about(one)
        self._write()

    def _check(self, one: ImageResult) -> None:
        """Raise if what is there is not the prediction of its image by this checkpoint."""
        known, about = self.known.get(one.key), self._about(one)
        if known == about:
            return
        there = "another program's file" if known is None else f"the prediction of {told(known)}"
        raise ConfigError(
            f"{one.where} holds {there}, and would be that of {told(about)}: choose another folder, or overwrite it"
        )

    def _about(self, one: ImageResult) -> dict[str, str | int]:
        return {"image": str(one.image.resolve()), **self.model}

    def _write(self) -> None:
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(self.known, indent=1) + "\n", encoding="utf-8")
        written.replace(self.path)


def told(about: Mapping[str, str | int]) -> str:
    """Of what a file is, for a message."""
    grid = f", on the grid of the {about['grid']}" if "grid" in about else ""
    return f"{about['image']} by step {about['step']} of {about['run']}{grid}"
