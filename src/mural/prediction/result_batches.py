"""What becomes of a batch: label maps in files, or rows of a table. On each rank; one of them has the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mural.comm.failure.agree import together
from mural.data import Batch
from mural.engine import Parallel
from mural.prediction.result_files import ImageFiles, ResultRecord
from mural.prediction.result_form import ResultStyle
from mural.prediction.result_rows import ImageRow, ResultTable, image_rows
from mural.prediction.result_sink import MapSink, deliver
from mural.train.config import Config


class ResultBatches(Protocol):
    """Writes the results of batches."""

    def take(self, batch: Batch) -> None:
        """Predict a batch, and write its results. Collective."""
        ...


class MapBatches:
    """Files with a label, or numbers, for every position."""

    def __init__(
        self, pm: Parallel, config: Config, files: Sequence[ImageFiles], style: ResultStyle, record: ResultRecord | None
    ):
        self.pm, self.config, self.files, self.record = pm, config, files, record
        self.forms = [style.form(one.image, config.data.level) for one in files]

    def take(self, batch: Batch) -> None:
        """Write the files of a batch's images; what was there goes first."""
        mesh, files = self.pm.world_mesh, [self.files[index] for index in batch.indices]
        with together(mesh, "the record of predictions"):
            if self.record is not None:
                self.record.begin(files)
        with MapSink(files, [self.forms[index] for index in batch.indices], batch, self.config, mesh) as sink:
            deliver(self.pm, batch, sink)


class RowBatches:
    """Rows of a table, one for each image."""

    def __init__(
        self, pm: Parallel, config: Config, rows: Sequence[ImageRow], table: ResultTable, record: ResultRecord | None
    ):
        self.pm, self.config, self.table, self.record = pm, config, table, record
        with together(pm.world_mesh, "the record of predictions"):
            if record is not None:
                for row in rows:
                    row.remove()
                # Before the record says that rows are by this checkpoint, no others are left.
                table.begin()
                record.begin(rows)

    def take(self, batch: Batch) -> None:
        """Add the rows of a batch's images."""
        rows = image_rows(self.pm, batch, self.config)
        with together(self.pm.world_mesh, f"writing {self.table.path.name}"):
            if self.record is not None:
                self.table.add(rows)
