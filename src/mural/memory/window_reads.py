"""Windows of images, read ahead of their use by threads and brought to a device while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from types import TracebackType
from typing import Self, cast

import torch
from torch import Tensor

from mural.comm.copy_streams import Moment
from mural.errors import DataError, LayoutError
from mural.geometry import Box, volume
from mural.memory.decoded_cache import Block, DecodedCache
from mural.memory.pinned import Buffers, Sent, settled
from mural.memory.readable import Readable
from mural.memory.reader_threads import readers
from mural.memory.window_source import HeldImage, WindowSource, pairs
from mural.ranks.spawn import processors

THREADS = min(8, max(2, processors() // 2))
"""How many threads read: half of the cores that there are, up to a few."""
TORN = 1.25
"""Windows tear tiles apart that have so many times their positions."""
NOT_THE_SOURCE = (MemoryError, torch.OutOfMemoryError)
"""Errors that say nothing about a source: raised as they are."""


class WindowReads:
    """The windows of one pass over some images, each as a tensor (1, C, *window) on a device.

        used   read ahead (ahead = 3)
        [ 4 ]  [ 5 ][ 6 ][ 7 ]                  8, 9, … are not begun

    `windows` are (number of the image, spatial box), in the order of their use. `reads[i]` begins window i and the
    `ahead` windows after it, and returns window i; windows may be skipped, and read again. Sources are tensors
    (C, *extents), or have `shape` and `read`; one that says its `dtype` and `chunks` is read without a trial, and along
    its tiles. Tensors on the device, or on a CPU that computes, are returned as views: do not write to them.

    `cache` keeps decoded blocks for other passes; if this pass is the only one to read (`once`), only where its windows
    tear many tiles of the file apart, which would be decoded for each of them. Pixels travel in the type of the source.
    On a GPU, `buffers` keeps pinned memory from pass to pass. The CPU does not queue work for more than one window
    after the one that the GPU is at, so windows do not pile up there.

    Use it in a `with` block: leaving it ends the threads and frees what was read and not used.
    """

    def __init__(
        self,
        sources: Sequence[Readable | Tensor],
        windows: Sequence[tuple[int, Box]],
        *,
        device: torch.device | str = "cpu",
        threads: int = THREADS,
        ahead: int = 3,
        cache: DecodedCache | None = None,
        buffers: Buffers | None = None,
        once: bool = False,
    ):
        if threads < 1 or ahead < 0:
            raise LayoutError(
                f"threads={threads}, ahead={ahead}: at least 1 thread reads, and at least 0 windows ahead"
            )
        self.images, self.windows = [WindowSource(source, k) for k, source in enumerate(sources)], list(windows)
        for number, box in self.windows:
            if not 0 <= number < len(self.images):
                raise LayoutError(f"a window of image {number}, but the images are 0 to {len(self.images) - 1}")
            self.images[number].check(box)
        self.device, self.threads, self.ahead = settled(device), threads, ahead
        torn = sum(self.images[k].decoded(box) for k, box in self.windows)
        self.cache = cache if not once or torn > TORN * sum(volume(box) for _, box in self.windows) else None
        if buffers is not None and buffers.device != self.device:
            raise LayoutError(f"buffers for {buffers.device} do not bring windows to {self.device}: make them for it")
        self.owned = buffers is None
        self.buffers = Buffers(self.device, keep=ahead + 2) if buffers is None else buffers
        self.ready = [is_on(image, self.device) for image in self.images]
        """Images of which a window is a view, or a copy that needs no thread."""
        self.most = max((self.images[k].shape[0] * volume(box) for k, box in self.windows), default=0)
        self.begun: dict[int, WindowRead] = {}
        self.queued: deque[Moment] = deque()
        self.closed = False
        self.workers = readers(threads)

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Tensor:
        if self.closed:
            raise DataError("the windows were closed: read them inside of the `with` block")
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} of {len(self)}")
        with torch.inference_mode(False):  # threads may not write to tensors of inference
            self._begin(range(i, min(i + self.ahead + 1, len(self))))
            self._keep_up()
            number, box = self.windows[i]
            return self.images[number].read(box)[None].to(self.device) if self.ready[number] else self._arrived(i)

    def _begin(self, coming: range) -> None:
        """Have these windows read, in order, and give up all others."""
        for k in [k for k in self.begun if k not in coming]:
            self.begun.pop(k).drop()
        for k in coming:
            number, box = self.windows[k]
            if k not in self.begun and not self.ready[number]:
                self.begun[k] = read = WindowRead(self.images[number], box, self.buffers)
                read.begin(self.workers, self.threads, self.most, self.cache)

    def _keep_up(self) -> None:
        """Wait until the GPU is done with all windows before the last one: queued work holds its windows' memory."""
        if self.buffers.lanes is not None:
            self.queued.append(self.buffers.lanes.now())
            if len(self.queued) > 1:
                self.buffers.lanes.finish(self.queued.popleft())

    def _arrived(self, i: int) -> Tensor:
        """Window i on the device; the next is sent too, if it is read, to travel while this one is used."""
        try:
            sent = self.begun[i].send()
        except Exception:
            self.begun.pop(i).drop()
            raise
        del self.begun[i]
        if i + 1 in self.begun and self.begun[i + 1].complete:
            self.begun[i + 1].send()
        return sent.arrived()

    def close(self) -> None:
        """End the threads, each after the part it is at, and free what was read and not used."""
        if self.closed:
            return
        self.closed = True
        self.workers.shutdown(cancel_futures=True)
        for read in self.begun.values():
            read.drop()
        self.begun.clear()
        self.queued.clear()
        if self.owned:
            self.buffers.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def is_on(image: WindowSource, device: torch.device) -> bool:
    """Whether an image is a tensor on that device, or on a GPU, from where threads do not bring it sooner."""
    return isinstance(image.source, HeldImage) and (image.source.values.device == device or image.source.values.is_cuda)


class WindowRead:
    """One window under way: the memory that tasks fill, then its copy on the device."""

    def __init__(self, image: WindowSource, box: Box, buffers: Buffers):
        self.image, self.box, self.buffers = image, box, buffers
        self.memory: Tensor | None = None
        self.tasks: list[Future[None]] = []
        self.failure: Exception | None = None
        self.sent: Sent | None = None

    def begin(self, workers: Executor, threads: int, most: int, cache: DecodedCache | None) -> None:
        """Have the window read, into a buffer of `most` elements; what goes wrong is raised when the window is used."""
        try:
            dtype = self.image.dtype
            shape = (1, self.image.shape[0], *(i.size for i in self.box))
            self.memory = self.buffers.new(shape, dtype, room=most * dtype.itemsize)
            for fill, claimed in self.image.fills(self.box, self.memory[0], threads, cache):
                self._submit(workers, fill, claimed, cache)
        except Exception as error:
            self.failure = error

    def _submit(
        self, workers: Executor, fill: Callable[[], None], claimed: Block | None, cache: DecodedCache | None
    ) -> None:
        """Queue a task. A block that it claimed and will never decode is given up, as others wait for it."""
        if cache is None or claimed is None:
            self.tasks.append(workers.submit(fill))
            return
        try:
            task = workers.submit(fill)
        except BaseException:
            cache.withdraw(claimed)
            raise
        task.add_done_callback(lambda task: cache.withdraw(claimed) if task.cancelled() else None)
        self.tasks.append(task)

    @property
    def complete(self) -> bool:
        """Whether the window was read without an error."""
        return self.failure is None and all(task.done() and task.exception() is None for task in self.tasks)

    def send(self) -> Sent:
        """The window on its way to the device, once it was read; raises the first error in the order of its parts."""
        if self.sent is None:
            wait(self.tasks)
            errors = [self.failure, *(task.exception() for task in self.tasks)]
            for error in errors:
                if error is not None:
                    raise error if isinstance(error, NOT_THE_SOURCE) else self._named(error) from error
            self.sent, self.memory = self.buffers.sent(cast("Tensor", self.memory)), None
        return self.sent

    def _named(self, error: BaseException) -> DataError:
        """The error of a source, with its name and the window."""
        words = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        name, place = self.image.name, pairs(self.box)
        return DataError(f"{name}: the window {place} cannot be read: {words.removeprefix(f'{name}: ')}", name, place)

    def drop(self) -> None:
        """Give the window up: what has not begun is not read, and its memory is free once nobody writes to it."""
        wait([task for task in self.tasks if not task.cancel()])
        self.buffers.drop(self.memory)
        self.memory = self.sent = None
