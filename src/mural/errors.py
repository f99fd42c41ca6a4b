"""The errors that mural raises, each with the values, the rule and the smallest fix in its message."""

from __future__ import annotations

import errno
import importlib
from typing import Any

DISTRIBUTION = "mural-train"
"""What pip calls mural: the name `mural` on PyPI is that of another project."""
TOLD = "told_by_mural"
TRACEBACK = "MURAL_TRACEBACK"
"""The variable that makes the command line print tracebacks."""


class MuralError(Exception):
    """Everything that mural raises on purpose."""


class PlanError(MuralError, ValueError):
    """A mesh, grid or plan that does not fit the ranks or the image."""


class LayoutError(MuralError, ValueError):
    """Tensors whose places on the mesh cannot be brought together."""


class ShapeError(MuralError, RuntimeError):
    """Shapes that a layer does not take, for which torch would raise a RuntimeError."""


class UnsupportedOp(MuralError, NotImplementedError):
    """An operation on a sharded tensor for which no exact rule exists."""


class OutOfTime(UnsupportedOp):
    """An operation that needs other images of a batch, which come in another micro-batch."""


class PeerError(MuralError, RuntimeError):
    """Another rank raised, or died, while this one waited for its message."""


class ConfigError(PlanError):
    """A plan or configuration that names something unknown, or gives a value of the wrong kind."""


class TrainingError(MuralError, RuntimeError):
    """A run that cannot go on: a loss that is not a number, a rank that hangs."""


class CheckpointError(MuralError, RuntimeError):
    """A checkpoint that could not be written, or that cannot be read; raised on every rank."""


class DataError(MuralError, ValueError):
    """A file that cannot be read or written as asked; the message names file, box and remedy.

    `name` is the file's (or the source's) and `box` the part that was asked for, where there was one.
    """

    def __init__(self, message: str, name: str = "", box: object = None) -> None:
        super().__init__(message)
        self.name, self.box = name, box


def tell(error: BaseException, text: str) -> None:
    """Let an error that is not mural's be told in one line, where mural's own errors are; a first text stays."""
    error.__dict__.setdefault(TOLD, text)


def told(error: BaseException) -> str:
    """An error in one line: the message of mural's own, what was said of another; empty if it needs its traceback.

    >>> told(PlanError("2 ranks are missing")), told(ValueError("?"))
    ('2 ranks are missing', '')
    """
    return str(error) if isinstance(error, MuralError) else error.__dict__.get(TOLD, "")


def cannot_write(what: str, error: OSError) -> ConfigError:
    """The error for something that the system does not let be written, with the remedy.

    >>> print(cannot_write("plan.toml", OSError(errno.ENOSPC, "No space left on device")))
    plan.toml cannot be written: No space left on device: make room, or choose another disk
    """
    remedies = {
        errno.EEXIST: "a file is in the way: choose another name",
        errno.ENOTDIR: "a file is in the way: choose another folder",
        errno.EISDIR: "it is a folder: choose another name",
        errno.ENOENT: "its folder does not exist: make it, or choose another one",
        errno.ENOSPC: f"{error.strerror}: make room, or choose another disk",
        errno.EDQUOT: f"{error.strerror}: make room, or choose another disk",
    }
    other = f"{error.strerror or error}: choose a folder that you may write to"
    return ConfigError(f"{what} cannot be written: {remedies.get(error.errno or 0, other)}")


def package(name: str, extra: str, what: str = "this file", error: type[MuralError] = DataError) -> Any:
    """A module of an optional package, or an error that says how to install it.

    >>> package("nothing_of_this_name", "slides")
    Traceback (most recent call last):
    mural.errors.DataError: this file needs the package nothing_of_this_name: pip install "mural-train[slides]"
    """
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise error(
            f'{what} needs the package {name.split(".")[0]}: pip install "{DISTRIBUTION}[{extra}]"'
        ) from missing
