"""Optional packages: imported when a format needs them, and named with their extra where they are not there."""

from __future__ import annotations

import importlib
from typing import Any

from mural.errors import DataError


def package(name: str, extra: str) -> Any:
    """A module of an optional package, or an error that says how to install it.

    >>> package("nothing_of_this_name", "slides")
    Traceback (most recent call last):
    mural.errors.DataError: this file needs the package nothing_of_this_name: pip install "mural[slides]"
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f'this file needs the package {name.split(".")[0]}: pip install "mural[{extra}]"') from error
