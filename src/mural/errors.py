"""The errors that mural raises, each with the values, the rule and the smallest fix in its message."""

from __future__ import annotations

import errno
import importlib
import re
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


class ProofError(MuralError, RuntimeError):
    """A plan whose small case differs from one device by more than rounding explains: nothing was trained."""


class CheckpointError(MuralError, RuntimeError):
    """A checkpoint that could not be written, or that cannot be read; raised on every rank."""


class DataError(MuralError, ValueError):
    """A file that cannot be read or written as asked; the message names file, box and remedy.

    `name` is the file's (or the source's) and `box` the part that was asked for, where there was one.
    """

    def __init__(self, message: str, name: str = "", box: object = None) -> None:
        super().__init__(message)
        self.name, self.box = name, box


class UnfitData(DataError):
    """An image, mask or label that can be read and does not fit the run: never left out as one that cannot be read."""


def tell(error: BaseException, text: str) -> None:
    """Let an error that is not mural's be told in one line, where mural's own errors are; a first text stays."""
    error.__dict__.setdefault(TOLD, text)


def told(error: BaseException) -> str:
    """An error in one line: the message of mural's own, what was said of another; empty if it needs its traceback.

    >>> told(PlanError("2 ranks are missing")), told(ValueError("?"))
    ('2 ranks are missing', '')
    """
    return str(error) if isinstance(error, MuralError) else error.__dict__.get(TOLD, "")


WRITING = {
    errno.EEXIST: "a file is in the way: choose another name",
    errno.ENOTDIR: "a file is in the way: choose another folder",
    errno.EISDIR: "it is a folder: choose another name",
    errno.ENOENT: "its folder does not exist: make it, or choose another one",
    errno.ENOSPC: "make room, or choose another disk",
    errno.EDQUOT: "make room, or choose another disk",
    errno.EFBIG: "the system allows no larger file: raise its limit, or choose another disk",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "too many files are open: raise the limit, as by ulimit -n 4096",
    errno.EIO: "the disk fails: choose another one",
}
"""What to do where the system does not let something be written, by its reason."""
READING = {
    errno.EACCES: "change its permissions, or copy it",
    errno.EPERM: "change its permissions, or copy it",
    errno.ENOENT: "it was moved or removed: put it back",
    errno.EMFILE: "too many files are open: raise the limit, as by ulimit -n 4096",
    errno.EIO: "the disk fails: copy the file from elsewhere",
}
"""What to do where it does not let something be read."""
OTHERS_REASON = re.compile(r"os_error_code='(\d+)'")
"""How tensorstore names the system's reason, in an error that is not an OSError."""


def reason_of(error: BaseException) -> int:
    """The system's reason of an error, as in `errno`; 0 where it has another cause.

    >>> reason_of(OSError(errno.ENOSPC, "full")), reason_of(ValueError("NOT_FOUND: … [os_error_code='2']"))
    (28, 2)
    """
    if isinstance(error, OSError):
        return error.errno or 0
    found = OTHERS_REASON.search(str(error))
    return int(found.group(1)) if found else 0


def reading_hint(error: BaseException, damaged: str) -> str:
    """What to do about a file that could not be read: by the system's reason, or `damaged` where it was not decoded.

    Nothing where the cause is another one, such as a package that is missing.

    >>> (
    ...     reading_hint(OSError(errno.EIO, "I/O error"), "copy it again"),
    ...     reading_hint(ImportError("lzma"), "copy it again"),
    ... )
    ('the disk fails: copy the file from elsewhere', '')
    """
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if reason := next(filter(None, map(reason_of, causes)), 0):
        return READING.get(reason, "")
    other = any(isinstance(one, (ImportError, NotImplementedError, MuralError, MemoryError)) for one in causes)
    return "" if other or "requires the" in str(error) else damaged


def cannot_write(what: str, error: OSError) -> ConfigError:
    """The error for something that the system does not let be written, with the remedy if the reason has one.

    >>> print(cannot_write("plan.toml", OSError(errno.ENOSPC, "No space left on device")))
    plan.toml cannot be written: No space left on device: make room, or choose another disk
    """
    remedy, reason = WRITING.get(reason_of(error), ""), error.strerror or str(error)
    words = remedy if remedy.startswith(("a file", "it ", "its ")) else f"{reason}: {remedy}" if remedy else reason
    return ConfigError(f"{what} cannot be written: {words}")


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
