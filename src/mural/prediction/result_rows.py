"""The results of models that say one thing of a whole image, such as its class: a row for each in a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mural.data import Batch
from mural.engine import Parallel
from mural.errors import ConfigError
from mural.train.config import Config
from mural.train.result_meaning import meaning_of

TABLE = "predictions.csv"
Row = dict[str, str]


class ResultTable:
    """A CSV file with a row for each image, by the path that the image was given by. One process reads and writes it.

    Rows are appended as they come. A last row that was cut off is predicted again.
    """

    def __init__(self, path: Path):
        self.path, self.rows, self.columns = path, dict[str, Row](), list[str]()
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                found = list(csv.reader(file))
            self.columns = found[0] if found else []
            if self.columns[:1] != ["image"]:
                raise ConfigError(f"{path} is another program's file: choose another folder")
            whole = [dict(zip(self.columns, row, strict=True)) for row in found[1:] if len(row) == len(self.columns)]
            self.rows = {row["image"]: row for row in whole}

    def begin(self) -> None:
        """Write the rows that stay."""
        if self.columns:
            written = self.path.with_suffix(".csv.part")
            with written.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([self.columns, *(row.values() for row in self.rows.values())])
            written.replace(self.path)

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows, which have the columns of those before."""
        with self.path.open("a", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            for row in rows:
                if not self.columns:
                    self.columns = list(row)
                    out.writerow(self.columns)
                if list(row) != self.columns:
                    raise ConfigError(
                        f"{self.path} has the columns {', '.join(self.columns)}, but this model gives "
                        f"{', '.join(row)}: choose another folder"
                    )
                out.writerow(row.values())
                self.rows[row["image"]] = row


@dataclass(frozen=True)
class ImageRow:
    """An image, and the table in which its row is."""

    image: Path
    table: ResultTable

    @property
    def key(self) -> str:
        """What the image is called in the record of results."""
        return str(self.image)

    @property
    def where(self) -> Path:
        """The file of its result."""
        return self.table.path

    def exists(self, every: Callable[[Iterable[bool]], bool]) -> bool:
        """Whether its row is there."""
        return every([self.key in self.table.rows])

    def remove(self) -> None:
        """Take its row out, until the table is written again."""
        self.table.rows.pop(self.key, None)


def image_rows(pm: Parallel, batch: Batch, config: Config) -> list[Row]:
    """What the model says of the images of a batch. Collective."""
    result = pm(batch.image)
    scores: Tensor = result.full() if hasattr(result, "full") else result
    if not torch.is_tensor(scores) or scores.ndim != 2:
        raise ConfigError(
            f"the model gives {getattr(scores, 'shape', type(scores))}, not a row of numbers for an image"
        )
    described = row_of(config, scores.shape[1])
    return [{"image": name} | described(one) for name, one in zip(batch.names, scores.cpu(), strict=True)]


def row_of(config: Config, count: int) -> Callable[[Tensor], Row]:
    """What makes a row of the numbers (K) of an image.

    >>> row_of(Config.of({"data": {"classes": ["no", "yes"]}}), 2)(torch.tensor([0.0, 1.0]))
    {'class': '1', 'name': 'yes', 'probability/no': '0.268941', 'probability/yes': '0.731059'}
    """
    meaning, given = meaning_of(config, count), config.data.classes
    names: Sequence[str] = given if len(given) == count else [str(number) for number in range(count)]

    def numbers(title: str, values: Tensor, form: Callable[[float], str]) -> Row:
        titles = [title] if count == 1 else [f"{title}/{name}" for name in names]
        return dict(zip(titles, map(form, values.tolist()), strict=True))

    def row(scores: Tensor) -> Row:
        labels = meaning.labels(scores[None])[0]
        if meaning.kind in ("values", "unknown"):
            return numbers("value", labels, lambda value: f"{value:.9g}")
        if meaning.kind == "classes":
            number = int(labels)
            chosen = {"class": str(number)} | ({"name": given[number]} if names is given else {})
        else:
            chosen = numbers("class", labels, str)
        return chosen | numbers("probability", meaning.probabilities(scores[None])[0], lambda p: f"{p:.6g}")

    return row
