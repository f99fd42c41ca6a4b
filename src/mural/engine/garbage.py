"""Python's garbage collector while a step runs: it looks at the objects of the step alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager

EVERY = 60.0
"""Seconds after which all objects are looked at again, before a step."""
PYTHONS_OWN = 1000
"""More objects than Python itself keeps frozen: 3.12 begins with 375. Somebody who freezes has all those of torch."""
_looked = [time.monotonic()]


@contextmanager
def older_objects_aside() -> Generator[None]:
    """A block in which the collector leaves all objects alone that were there before.

    A step makes many small objects. Each full collection on their account would go through all of torch: a tenth of a
    second and more, while the GPU waits. What became garbage since the last step is collected first, and once a minute
    what was there before. Where somebody has frozen objects already, nothing is changed.
    """
    if gc.get_freeze_count() > PYTHONS_OWN:
        yield
        return
    due = time.monotonic() - _looked[0] > EVERY
    gc.collect(2 if due else 1)
    if due:
        _looked[0] = time.monotonic()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
