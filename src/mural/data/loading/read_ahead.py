"""Steps that are read ahead: this rank's part of each batch, filled by threads while the training computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mural.data.image_sample import name_at
from mural.data.loading.piece_reader import CLASS, MASK, NOTHING, Reader, SampleForm, SamplePiece
from mural.data.loading.pixels import Pixels
from mural.data.source import pairs
from mural.errors import DataError, UnfitData, reading_hint
from mural.geometry import Box
from mural.memory.pinned import Buffers, Sent

NOT_THE_SAMPLE = (MemoryError, ImportError)
"""What does not mean that a sample cannot be read: raised even where bad samples are skipped."""


@dataclass(frozen=True)
class UnreadSample:
    """Why a sample could not be read on this rank."""

    reason: str
    fatal: bool


@dataclass(frozen=True)
class Batched:
    """Which samples are in one batch, in order."""

    epoch: int
    number: int
    indices: tuple[int, ...]
    places: tuple[int, ...]
    """The places in the batch that this rank reads."""


class StepRead:
    """This rank's part of one batch under way; `wait` until it is complete.

    One task opens the samples, then one for each part of each sample reads it; whatever they raise becomes that
    sample's `failures` entry. The tensors hold a place for each of this rank's samples that could be opened; what the
    reader does not need on this rank is neither read nor given memory. Nor is what it needs by window, of which the
    sources are opened alone.
    """

    def __init__(self, reader: Reader, batched: Batched, workers: Executor, buffers: Buffers, parts: int):
        self.reader, self.batched, self.workers, self.buffers, self.parts = reader, batched, workers, buffers, parts
        self.pieces: dict[int, SamplePiece] = {}
        self.failures: dict[int, UnreadSample] = {}
        self.image: Tensor | None = None
        self.target: Tensor | None = None
        self.sent: tuple[Sent | None, Sent | None] | None = None
        self.opening: Future[list[Future[None]]] = workers.submit(self._open)

    @property
    def complete(self) -> bool:
        """Whether everything was read."""
        return self.opening.done() and all(part.done() for part in self.opening.result())

    def wait(self) -> float:
        """The seconds that it took until the step was complete."""
        start = time.perf_counter()
        wait(self.opening.result())
        return time.perf_counter() - start

    def _open(self) -> list[Future[None]]:
        """Open the samples, and have their parts read."""
        for place in self.batched.places:
            index = self.batched.indices[place]
            try:
                self.pieces[place] = self.reader.open(index, self.batched.epoch)
            except BaseException as error:
                self._failed(place, name_at(self.reader.samples, index) or f"sample {index}", None, error)
        try:
            tasks = self._tasks()
        except BaseException as error:
            tasks = []
            for place, piece in self.pieces.items():
                self._failed(place, piece.name, piece.box, error, fatal=True)
        try:
            return [self.workers.submit(task) for task in tasks]
        except RuntimeError:
            return []  # the pool was closed meanwhile; the error would keep this step and its files alive

    def _tasks(self) -> list[Callable[[], None]]:
        """The memory of the batch, and what fills it; nothing where samples do not fit together."""
        forms = {piece.form for piece in self.pieces.values()}
        if len(forms) != 1:
            return []
        first = next(iter(self.pieces.values()))
        extents, count = tuple(i.size for i in first.box), len(self.pieces)
        if self.reader.needs.image and not self.reader.needs.by_window:
            self.image = self.buffers.new((count, first.form.channels, *extents), self.reader.pixels.dtype)
        image, target = self.image, self._target_memory(first.form, extents, count)
        self.target = target
        per_sample = max(1, self.parts // count)
        tasks: list[Callable[[], None]] = []
        for slot, (place, piece) in enumerate(self.pieces.items()):
            if piece.label is not None and target is not None:
                target[slot] = piece.label
            mask = target[slot] if piece.mask is not None and target is not None else None
            for fill in self.reader.tasks(piece, None if image is None else image[slot], mask, per_sample):
                tasks.append(partial(self._run, place, fill))
        return tasks

    def _target_memory(self, form: SampleForm, extents: tuple[int, ...], count: int) -> Tensor | None:
        needs = self.reader.needs
        if form.target == NOTHING or not needs.target or (needs.by_window and form.target == MASK):
            return None
        shape = target_shape(form, self.reader.pixels.mask == "channels", extents)
        return self.buffers.new((count, *shape), target_dtype(form, self.reader.pixels))

    def _run(self, place: int, fill: Callable[[], None]) -> None:
        try:
            if place not in self.failures:
                fill()
        except BaseException as error:
            piece = self.pieces[place]
            self._failed(place, piece.name, piece.view.behind(piece.box), error)

    def _failed(self, place: int, name: str, box: Box | None, error: BaseException, fatal: bool = False) -> None:
        fatal = fatal or isinstance(error, (*NOT_THE_SAMPLE, UnfitData))
        self.failures.setdefault(place, UnreadSample(in_words(name, box, error), fatal))

    def send(self) -> tuple[Sent | None, Sent | None]:
        """Image and target on their way to the device, once."""
        if self.sent is None:
            self.sent = (
                None if self.image is None else self.buffers.sent(self.image),
                None if self.target is None else self.buffers.sent(self.target),
            )
            self.image = self.target = None
        return self.sent

    def abandon(self) -> None:
        """Give back the memory of a step whose tasks were dropped."""
        self.buffers.drop(self.image)
        self.buffers.drop(self.target)


class ReadAhead:
    """The steps from `start` to `stop`; while one is used, the `prefetch` steps after it are read.

    used   read ahead (prefetch = 2)
    [ 4 ]  [ 5 ][ 6 ]                  7, 8, … are not begun
    """

    def __init__(self, begin: Callable[[int], StepRead], workers: Executor, start: int, stop: int, prefetch: int):
        self.begin, self.workers, self.prefetch = begin, workers, prefetch
        self.begun, self.stop = start, stop
        self.steps: deque[StepRead] = deque()

    def next(self) -> tuple[StepRead, float]:
        """The next step, complete, and the seconds that it was waited for."""
        while self.begun < self.stop and len(self.steps) <= self.prefetch:
            self.steps.append(self.begin(self.begun))
            self.begun += 1
        waited = self.steps[0].wait()
        step = self.steps.popleft()
        if self.steps and self.steps[0].complete:
            self.steps[0].send()  # it travels to the device while this step is computed
        return step, waited

    def close(self) -> None:
        """End the reading at once: each thread finishes the part it is in."""
        self.workers.shutdown(cancel_futures=True)
        for step in self.steps:
            step.abandon()
        self.steps.clear()


def in_words(name: str, box: Box | None, error: BaseException) -> str:
    """Why a box of a sample could not be read; without a box, why the sample could not be opened."""
    what = f"{name}, box {pairs(box)}" if box is not None else name
    if isinstance(error, DataError):
        return f"{what}: {error}"
    hint = reading_hint(error, "")
    return f"{what}: {type(error).__name__}: {error}{hint and f': {hint}'}"


def target_dtype(form: SampleForm, pixels: Pixels) -> torch.dtype:
    """The type of targets of a form."""
    return pixels.target_dtype if form.target == MASK else torch.int64 if form.target == CLASS else pixels.dtype


def target_shape(form: SampleForm, with_channels: bool, extents: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one sample's target whose spatial extents are these."""
    if form.target == MASK:
        return (form.width, *extents) if with_channels else extents
    return (form.width,) if form.width else ()
