"""Open files: those that stay open between steps, the most recently used few of them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mural.data.open import open as open_image
from mural.data.source import Source

CAPACITY = 32


class OpenFiles:
    """Open sources by path; one that is in use stays open, of the others the last few do. Threads may share it.

    Each source decodes in the thread that reads it: the loader's workers are the threads.
    """

    def __init__(self, capacity: int = CAPACITY):
        self.capacity = capacity
        self.lock = threading.Lock()
        self.sources: OrderedDict[str, Source] = OrderedDict()
        self.users: dict[str, int] = {}
        self.decoded = 0
        """Bytes that sources had decoded when they were closed."""

    def take(self, path: str) -> Source:
        """The open source of a path, until `put`."""
        with self.lock:
            source = self.sources.get(path)
            if source is not None:
                self.users[path] = self.users.get(path, 0) + 1
                return source
        fresh = open_image(path, threads=1)
        with self.lock:
            source = self.sources.setdefault(path, fresh)  # another thread may have been faster
            self.users[path] = self.users.get(path, 0) + 1
        if source is not fresh:
            fresh.close()
        return source

    def put(self, path: str) -> None:
        """Give a source back; the one that lay unused for longest is closed where too many are open."""
        closing: list[Source] = []
        with self.lock:
            self.users[path] -= 1
            self.sources.move_to_end(path)
            unused = [p for p in self.sources if not self.users[p]]
            for old in unused[: max(0, len(self.sources) - self.capacity)]:
                closing.append(self.sources.pop(old))
                del self.users[old]
            self.decoded += sum(source.counter.bytes_decoded for source in closing)
        for source in closing:
            source.close()

    @property
    def bytes_decoded(self) -> int:
        """The uncompressed bytes of tiles that were decoded so far."""
        with self.lock:
            return self.decoded + sum(source.counter.bytes_decoded for source in self.sources.values())

    def close(self) -> None:
        """Close all files; a later `take` opens them again."""
        with self.lock:
            sources, self.sources, self.users = list(self.sources.values()), OrderedDict(), {}
            self.decoded += sum(source.counter.bytes_decoded for source in sources)
        for source in sources:
            source.close()
