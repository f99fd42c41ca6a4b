"""The names of the package: few, and each part of it is there once `mural` is imported."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import mural


def test_there_are_at_most_16_public_names() -> None:
    assert len(mural.__all__) <= 16
    assert [name for name in mural.__all__ if not hasattr(mural, name)] == []


def test_parts_of_the_package_need_no_import_of_their_own() -> None:
    parts = [part.name for part in pkgutil.iter_modules(mural.__path__) if not part.name.startswith("_")]
    assert [name for name in parts if not hasattr(mural, name)] == []
    with pytest.raises(AttributeError, match="module 'mural' has no attribute 'modells'"):
        _ = mural.modells


def test_what_most_programs_do_not_need_is_imported_when_it_is_asked_for() -> None:
    script = "import sys, mural; print([n for n in ('mural.train', 'mural.models') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
