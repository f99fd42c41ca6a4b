"""What code of the user's own raised, in one line: the error, the layer of the model, and the line of the file."""

from __future__ import annotations

import sysconfig
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from os import sep
from pathlib import Path
from traceback import walk_tb

import torch
from torch import nn

from mural.errors import TRACEBACK, LayoutError, MuralError, ShapeError, UnsupportedOp, tell

LONGEST, SHOWN = 200, 3
"""Characters of an error's own words, and names that a message lists."""
OTHERS = (f"{Path(torch.__file__).parent}{sep}", f"{Path(__file__).parents[1]}{sep}", "<")
"""Where torch's and mural's own code is, and what has no file."""
LESS_MEMORY = 'set plan.recompute = "all", plan.offload or plan.stream, or let `mural plan` choose'
STANDARD, INSTALLED = sysconfig.get_path("stdlib"), "site-packages"


def in_layer(error: BaseException, model: nn.Module) -> str:
    """The innermost layer of the model that was being called, in words; nothing where the error came from elsewhere.

    >>> model = nn.Sequential(nn.ReLU(), nn.Linear(3, 1))
    >>> try:
    ...     model(torch.ones(1, 2))
    ... except RuntimeError as error:
    ...     in_layer(error, model)
    ', in the layer 1 (Linear)'
    """
    names = {id(module): name for name, module in model.named_modules()}
    called = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    inside = [module for module in called if isinstance(module, nn.Module) and id(module) in names]
    if not inside:
        return ""
    name, kind = names[id(inside[-1])], type(inside[-1]).__name__
    return f", in the layer {name} ({kind})" if name else f", in the forward of {kind}"


def at_line(error: BaseException) -> str:
    """The innermost line of the user's own code that was running, in words; nothing where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in lines if not file.startswith(OTHERS) and not standard(file)]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def standard(file: str) -> bool:
    """Whether a file is part of Python."""
    return file.startswith(STANDARD) and INSTALLED not in file


def in_one_line(error: BaseException) -> str:
    """The type of an error and its first line, which is cut where it is long.

    >>> in_one_line(ValueError("no such width\\nTraceback …")), in_one_line(KeyError("x"))
    ('ValueError: no such width', "KeyError: 'x'")
    """
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    shown = first if len(first) <= LONGEST else f"{first[:LONGEST]} …"
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


@contextmanager
def told_in_one_line(doing: str, model: nn.Module | None = None) -> Generator[None]:
    """A block of the user's own code: what it raises can be told in one line, which says what was done and where."""
    try:
        yield
    except MuralError:
        raise
    except Exception as error:
        place = f"{'' if model is None else in_layer(error, model)}{at_line(error)}"
        if isinstance(error, torch.OutOfMemoryError):
            tell(error, f"{doing} found no memory left on the device ({in_one_line(error)}){place}: {LESS_MEMORY}")
        tell(error, f"{doing} raised {in_one_line(error)}{place}; {TRACEBACK}=1 shows the traceback")
        error.add_note(f"in {doing.rstrip(',')}{place}")
        raise


@contextmanager
def naming(doing: str, images: str, model: nn.Module) -> Generator[None]:
    """A block that computes on images: its errors name the layer, and what was computed on."""
    try:
        with told_in_one_line(f"{doing}, on {images},", model):
            yield
    except ShapeError as error:
        raise ShapeError(
            f"{error}{in_layer(error, model)}{at_line(error)}, for {images}: change model.arguments, or give images "
            f"that the model takes"
        ) from error
    except (LayoutError, UnsupportedOp) as error:
        if not (layer := in_layer(error, model)):
            raise
        raise type(error)(f"{error}{layer}{at_line(error)}") from error


def few(names: Sequence[str]) -> str:
    """The first names, and how many more there are.

    >>> few(["a.tif", "b.tif"]), few(["a", "b", "c", "d", "e"])
    ('a.tif, b.tif', 'a, b, c and 2 more')
    """
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
