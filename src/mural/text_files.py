"""Text files that appear whole or not at all, so that nothing half-written stands under a final name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mural.errors import cannot_write


def write_whole(path: Path, text: str) -> None:
    """Write a text next to its place, then move it there; what the system refuses raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def save_text(path: str | Path, text: str) -> None:
    """Write a text that a user asked for; what the system refuses raises an error that names the remedy."""
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise cannot_write(str(path), error) from error
