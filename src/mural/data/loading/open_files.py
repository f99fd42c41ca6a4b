"""Open files: those that stay open between steps, the most recently used few of them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mural.data.open import open as open_image
from mural.data.source import Counter, Source

CAPACITY = 32


class OpenFiles:
    """Sources by path, of which the last few are kept; the others are closed as soon as nobody uses them.

    Threads may share it. Each source decodes in the thread that reads it: the loader's workers are the threads.
    """

    def __init__(self, capacity: int = CAPACITY):
        self.capacity = capacity
        self.lock = threading.Lock()
        self.sources: OrderedDict[str, Source] = OrderedDict()
        self.counter = Counter()
        """What all sources decoded, those that are closed by now among them."""

    def take(self, path: str) -> Source:
        """The open source of a path; it stays open for as long as the caller keeps it."""
        with self.lock:
            found = self.sources.get(path)
        if found is None:
            found = open_image(path, threads=1)
            found.counter = self.counter
        with self.lock:
            found = self.sources.setdefault(path, found)  # another thread may have been faster
            self.sources.move_to_end(path)
            while len(self.sources) > self.capacity:
                self.sources.popitem(last=False)
        return found

    def close(self) -> None:
        """Keep no file open; a later `take` opens them again."""
        with self.lock:
            self.sources.clear()
