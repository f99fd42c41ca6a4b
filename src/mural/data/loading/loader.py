"""The loader: batches as sharded tensors, of which each rank reads only its own box of only its own samples."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from operator import attrgetter

import torch

from mural.data.image_sample import BadSample, Samples
from mural.data.loading.augment import Augment
from mural.data.loading.batches import Batch, assembled
from mural.data.loading.label_range import LabelRange
from mural.data.loading.open_files import OpenFiles
from mural.data.loading.piece_reader import Reader
from mural.data.loading.pixels import MaskKind, Pixels, Scale, per_channel
from mural.data.loading.preflight import DatasetFacts, inspect, raise_problems
from mural.data.loading.read_ahead import Batched, ReadAhead, StepRead
from mural.data.loading.seeded_draws import permutation
from mural.data.loading.step_agreement import BatchOutcome, check_same, consent
from mural.engine.inputs import Needs
from mural.errors import DataError
from mural.geometry import Cuts
from mural.memory.pinned import Buffers, settled
from mural.memory.reader_threads import readers
from mural.ranks import Mesh


class Loader:
    """The batches of a dataset, the same ones whatever the plan.

    The order of samples and all augmentations follow from (seed, epoch, sample) alone. The batch is cut along the data
    axis and images along the spatial axes as `mural.shard(…, align=align)` would; the last batch of an epoch may be
    smaller. `workers` threads read `prefetch` batches ahead. What one rank cannot read raises the same `DataError` on
    every rank; with `skip_bad`, that sample is left out everywhere and listed in `bad`. What can be read and does not
    fit the run, such as a mask with an unknown class, is an error even then.

    `crop` shows the model a part of each image of that size (at a random place while `shuffle` is on, else the middle;
    zeros around smaller images), `pad_to` adds zeros at the end of each dim up to a multiple; masks get `pad_target`
    (NaN: such a mask holds none itself), and where that is None, a mask that would have to be padded is an error.
    For `scale`, `mean`, `std`, `mask` and `labels` see `loading/pixels.py`; `label_range` says which labels a loss
    takes, and others are errors that name their file; `level` chooses a resolution. `needs` (see `pm.needs`) says
    what this rank takes of the batches: of the rest it reads the headers of files, and the pixels only if asked for.
    Where it takes them by window, batches hold sources, whose windows have the values of the same batch in memory; then
    `skip_bad` leaves out what cannot be opened, and a window that cannot be read is an error of the step.
    """

    def __init__(
        self,
        dataset: Samples,
        mesh: Mesh,
        *,
        batch: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        augment: Augment | None = None,
        prefetch: int = 2,
        workers: int = 2,
        align: int = 1,
        device: torch.device | str = "cpu",
        skip_bad: bool = False,
        dtype: torch.dtype = torch.float32,
        scale: Scale = "range",
        mean: Sequence[float] | float | None = None,
        std: Sequence[float] | float | None = None,
        mask: MaskKind = "classes",
        labels: Mapping[int, int] | None = None,
        label_range: LabelRange | None = None,
        level: int = 0,
        crop: Sequence[int] | None = None,
        pad_to: int = 1,
        pad_target: float | None = 0,
        needs: Needs | None = None,
    ):
        least = {"batch": (batch, 1), "prefetch": (prefetch, 0), "workers": (workers, 1), "align": (align, 1)}
        for name, (value, low) in (least | {"level": (level, 0), "pad_to": (pad_to, 1)}).items():
            if value < low:
                raise DataError(f"{name}={value} must be at least {low}")
        if crop is not None and min(crop) < 1:
            raise DataError(f"crop={tuple(crop)}: every side must be at least 1")
        if not len(dataset):
            raise DataError("the dataset is empty: there is nothing to load")
        mesh = mesh.folded  # ranks of the channel axis read images of their own
        needs = Needs(mesh) if needs is None else replace(needs, mesh=needs.mesh.folded)
        if needs.mesh.size("data") != mesh.size("data"):
            raise DataError(f"batches for {needs.mesh} cannot be divided over {mesh}: their data axes have to be equal")
        self.dataset, self.mesh, self.batch, self.shuffle, self.seed = dataset, mesh, batch, shuffle, seed
        self.prefetch, self.workers, self.skip_bad = prefetch, workers, skip_bad
        self.bad: list[BadSample] = []
        self.facts: DatasetFacts | None = None
        self.files = OpenFiles()
        self.buffers = Buffers(settled(device))
        pixels = Pixels(scale, per_channel(mean), per_channel(std), dtype, mask, labels, label_range)
        self.reader = Reader(
            dataset, needs, self.files, pixels, augment, seed, align, level,
            tuple(crop) if crop is not None else None, shuffle, pad_to, pad_target,
        )  # fmt: skip

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch; a batch all of whose samples are bad is left out of it."""
        return -(-len(self.dataset) // self.batch)

    def check(self) -> DatasetFacts:
        """Open every file before the run, divided over the ranks: what is wrong is raised on every rank. Collective.

        With `skip_bad`, files that cannot be opened are listed in `bad` and never read; what can be read and does not
        fit, such as a mask of another size than its image, is an error all the same. `facts` keeps what was found.
        """
        facts, unread, unfit = inspect(self.dataset, self.mesh, self.reader.level, self.reader.pixels)
        skipped = unread if self.skip_bad and len(unread) < len(self.dataset) else []
        raise_problems(
            sorted([problem for problem in (*unread, *unfit) if problem not in skipped], key=attrgetter("index"))
        )
        known = {bad.index for bad in self.bad}
        self.bad += [problem for problem in skipped if problem.index not in known]
        self.facts = facts
        return facts

    def order(self, epoch: int) -> tuple[int, ...]:
        """The samples in the order of an epoch."""
        count = len(self.dataset)
        return permutation(count, self.seed, epoch, "order") if self.shuffle else tuple(range(count))

    def batched(self, order: Sequence[int], epoch: int, number: int) -> Batched:
        """The samples of one batch, and which places in it this rank reads: not those known to be bad."""
        indices = tuple(order[number * self.batch : (number + 1) * self.batch])
        mine = range(*Cuts.even(len(indices), self.mesh.size("data")).interval(self.mesh.coordinates["data"]))
        if self.reader.needs.by_window:
            mine = range(len(indices))  # opened and no more: which of them a rank reads is up to the model
        bad = {sample.index for sample in self.bad}
        return Batched(epoch, number, indices, tuple(p for p in mine if indices[p] not in bad))

    def epoch(self, number: int, start: int = 0) -> Generator[Batch]:
        """The batches of an epoch, from step `start` on: nothing of earlier ones is read. Collective.

        Leaving the loop early, by `break` or an error, ends the threads that read ahead.
        """
        if not 0 <= start <= self.steps_per_epoch or number < 0:
            raise DataError(f"epoch {number}, step {start}: an epoch has the steps 0 to {self.steps_per_epoch - 1}")
        return self._epoch(number, start)

    def _epoch(self, epoch: int, start: int) -> Generator[Batch]:
        order, stop, found = self.order(epoch), self.steps_per_epoch, start > 0
        check_same(self.dataset, self.mesh, (self.batch, self.seed, self.shuffle, epoch, start))
        workers = readers(self.workers)

        def begin(number: int) -> StepRead:
            return StepRead(self.reader, self.batched(order, epoch, number), workers, self.buffers, self.workers)

        with closing(ReadAhead(begin, workers, start, stop, self.prefetch)) as ahead:
            for _ in range(start, stop):
                if ready := self._next(ahead):
                    found = True
                    yield ready.pop()  # from here on it is the training's alone, which may release its memory
        if not found:
            raise DataError(f"no sample could be read in epoch {epoch}: {self.summary()}")

    def _next(self, ahead: ReadAhead) -> list[Batch]:
        """The next batch; none where all its samples are bad."""
        try:
            step, waited = ahead.next()
            outcome = consent(step, self.dataset, self.mesh)
            self._note(outcome)
            return [] if outcome.form is None else [assembled(step, outcome, outcome.form, waited)]
        except DataError:
            raise  # on every rank
        except BaseException as error:
            self.mesh.transport.raised(error)  # the peers would wait for this rank
            raise

    def _note(self, outcome: BatchOutcome) -> None:
        """Raise what failed, or list it."""
        if not outcome.bad:
            return
        if outcome.fatal or not self.skip_bad:
            first, more = outcome.bad[0], len(outcome.bad) - 1
            others = f" (and {more} more of this batch)" if more else ""
            hint = "" if outcome.fatal else ". To leave bad samples out, set skip_bad=True"
            raise DataError(f"{first.reason}{others}{hint}", first.name)
        self.bad += outcome.bad

    def summary(self) -> str:
        """The bad samples that were left out, one on each line, for the end of a run."""
        if not self.bad:
            return f"all samples read were good ({len(self.dataset)} in the dataset)"
        lines = [f"{len(self.bad)} of {len(self.dataset)} samples were left out:"]
        return "\n".join([*lines, *(f"  {bad.name} (sample {bad.index}): {bad.reason}" for bad in self.bad)])

    @property
    def bytes_decoded(self) -> int:
        """The uncompressed bytes of file tiles that this rank decoded from the paths of its samples."""
        return self.files.counter.bytes_decoded

    def close(self) -> None:
        """Close the files that are kept open between steps; the loader can go on to be used."""
        self.files.close()
