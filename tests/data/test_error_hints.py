"""Remedies in errors about files: they follow from the cause, and where none is known there is none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mural.data import create
from mural.data import open as open_source
from mural.data.loading.read_ahead import in_words
from mural.data.open import FORMATS
from mural.data.writing.output import unwritable
from mural.errors import DataError, reading_hint

DAMAGED = "damaged: copy it again"


def write(path: Path) -> None:
    with create(path, (1, 8, 8), torch.uint8) as writer:
        writer.write([(0, 1), (0, 8), (0, 8)], torch.arange(64, dtype=torch.uint8).view(1, 8, 8))


@pytest.mark.parametrize("name", ["x.ome.zarr", "x.zarr", "x.tif"])
def test_a_path_with_dots_in_it(name: str, tmp_path: Path) -> None:
    """Of Zarr, tensorstore refuses `..`: every Zarr path with it ended in «make room» or «the metadata are damaged»."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path / "a" / "b" / ".." / ".." / "c" / name)
    for path in (tmp_path / "a" / ".." / "c" / name, Path(os.path.relpath(tmp_path / "c" / name))):
        assert int(open_source(path).read().sum()) == 64 * 63 // 2


def test_a_path_with_dots_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    write(tmp_path / "far" / "x.zarr")
    assert open_source(tmp_path / "link" / ".." / "x.zarr").read().shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: make room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded: make room"),
        (ValueError("OUT: Failed to write: No space left [os_error_code='28']"), "No space left: make room"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied: choose a folder that you may write"),
        (ValueError('Invalid file path: "/a/../b"'), 'Invalid file path: "/a/../b"'),
        (OSError(errno.EINVAL, "Invalid argument"), "Invalid argument"),
    ],
)
def test_only_a_full_disk_asks_for_room(error: Exception, words: str) -> None:
    text = str(unwritable(Path("x.zarr"), error))
    assert words in text
    assert ("make room" in text) == ("make room" in words)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ValueError("bad checksum"), DAMAGED),
        (PermissionError(errno.EACCES, "Permission denied"), "change its permissions, or copy it"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "too many files are open: raise the limit, as by ulimit -n 4096",
        ),
        (OSError("image file is truncated"), DAMAGED),
        (ImportError("no decoder"), ""),
        (MemoryError(), ""),
        (NotImplementedError("of this kind"), ""),
    ],
)
def test_only_what_cannot_be_decoded_is_damaged(error: Exception, hint: str) -> None:
    assert reading_hint(error, DAMAGED) == hint


def raising(error: Exception) -> Callable[..., None]:
    def reader(*_: object) -> None:
        raise error

    return reader


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError("no memory")])
def test_a_file_that_is_not_opened_for_another_reason(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x.tif")
    monkeypatch.setitem(vars(FORMATS[0]), "reader", raising(error))
    with pytest.raises(DataError) as caught:
        open_source(tmp_path / "x.tif")
    assert "damaged" not in str(caught.value)


def test_an_error_of_the_users_own_code_is_not_a_damaged_file() -> None:
    assert in_words("sample 3", None, KeyError("of my own")) == "sample 3: KeyError: 'of my own'"
