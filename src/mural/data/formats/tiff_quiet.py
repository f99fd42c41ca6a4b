"""Keeps tifffile's log lines off the terminal while mural opens a file, where nobody has configured logging."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

LOGGER = logging.getLogger("tifffile")
OPENING: ContextVar[bool] = ContextVar("OPENING", default=False)
"""Whether mural is opening a file, in this thread: another thread may use tifffile for itself meanwhile."""


def heard(_: logging.LogRecord) -> bool:
    """Whether a line goes on: to handlers always, but to the terminal, where logging puts the rest, not while we open.

    What is wrong with a file is in the error that opening it raises, so the lines would say it a second time.
    """
    return not OPENING.get() or LOGGER.hasHandlers()


LOGGER.addFilter(heard)


@contextmanager
def quiet() -> Generator[None]:
    """A block that opens a file with tifffile."""
    token = OPENING.set(True)
    try:
        yield
    finally:
        OPENING.reset(token)
