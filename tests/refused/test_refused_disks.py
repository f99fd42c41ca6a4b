"""Folders, disks and checkpoints that are refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from refusals import Bad, Made, as_it_is, called, check, cut_off, files_in, folded, refused, write_good

STEP = "run/checkpoints/step-00000002"
DATA, MANIFEST = f"{STEP}/rank-00000.safetensors", f"{STEP}/checkpoint.json"
MORE = "--train.steps 4"
WIDER = "--model.arguments 'classes = 2, width = 8, depth = 2'"
TEMPORARY = TemporaryDirectory()
ANEW = "To begin anew, give the run another folder (--folder …)"


def trained(then: Made = as_it_is) -> Made:
    """A run that is over, of which something was made bad."""

    def made(folder: Path) -> None:
        shutil.copytree(finished() / "run", folder / "run")
        then(folder)

    return made


@cache
def finished() -> Path:
    """A folder with a run that is over."""
    folder = Path(TEMPORARY.name)
    write_good(folder)
    with chdir(folder):
        assert called("train run.toml").code == 0
    return folder


def flipped(folder: Path) -> None:
    """A checkpoint with one bit changed."""
    data = bytearray((folder / DATA).read_bytes())
    data[-5] ^= 1
    (folder / DATA).write_bytes(data)


def folder_at(name: str) -> Made:
    return lambda folder: (folder / name).mkdir(parents=True)


def removed(name: str) -> Made:
    return lambda folder: (folder / name).unlink()


FOLDERS = [
    Bad("a file", "--folder run.toml", "the run's folder run.toml cannot be written: a file is in the way"),
    Bad("below a file", "--folder run.toml/run", "cannot be written: a file is in the way: choose another folder"),
    Bad("where nothing can be written", "--folder /proc/run", "the run's folder /proc/run cannot be written"),
    Bad("its configuration is a folder", "", "run/config.toml cannot be written", folder_at("run/config.toml")),
    Bad("its metrics are a folder", "", "run/metrics.jsonl cannot", folder_at("run/metrics.jsonl"), begun=True),
    Bad("its status is a folder", "", "run/status.json cannot", folder_at("run/status.json"), begun=True),
    Bad("another run's", "--checkpoint.resume never", 'holds step 2, but checkpoint.resume = "never"', trained()),
    Bad("an empty one", "--checkpoint.resume must", 'holds no checkpoint, but checkpoint.resume = "must"'),
]

CHECKPOINTS = [
    Bad("of another model", f"{WIDER} {MORE}", ("it is of another model: model.stem.0.weight", ANEW), trained()),
    Bad("of another optimizer", f"--optimizer.name AdamW {MORE}", "it holds the state of SGD", trained()),
    Bad("half of it", MORE, ("it was cut or changed", ANEW), trained(cut_off(DATA))),
    Bad("one bit of it", MORE, ("do not match their CRC-32", ANEW), trained(flipped)),
    Bad("half a manifest", MORE, ("checkpoint.json is damaged: it is not JSON", ANEW), trained(cut_off(MANIFEST))),
    Bad("without its manifest", MORE, "checkpoint.json is missing", trained(removed(MANIFEST))),
    Bad("without its data", MORE, "rank-00000.safetensors is missing", trained(removed(DATA))),
    Bad("to export, half of it", "export run a.safetensors", "it was cut or changed", trained(cut_off(DATA))),
    Bad("to export, of another step", "export run a.safetensors --step 7", "but of steps 2", trained()),
    Bad("to export, into a folder", "export run images", "images could not be written: Is a directory", trained()),
    Bad("to export, into nowhere", "export run x/a.safetensors", "name a file in a folder that exists", trained()),
    Bad("as weights", f"--folder new --model.weights {DATA}", "are written by `mural export RUN FILE`", trained()),
    Bad("to predict with, of another step", "predict run images/0.tif --step 7", "holds no step 7, but 2", trained()),
    Bad("to predict nothing with", "predict run 'x/*.tif'", "nothing matches 'x/*.tif'", trained()),
]


@pytest.mark.parametrize("bad", FOLDERS, ids=str)
def test_a_folder_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)


@pytest.mark.parametrize("bad", CHECKPOINTS, ids=str)
def test_a_checkpoint_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)


@contextmanager
def largest_file(size: int) -> Generator[None]:
    """A block in which no file grows larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("size", "file"), [(20_000, "rank-00000.safetensors"), (1_000, "config.toml")])
def test_a_disk_that_is_full_leaves_nothing_half(
    size: int, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_good(tmp_path)
    with largest_file(size):
        said = called("train run.toml")
    check(Bad("a full disk", "", (file, "File too large")), said)
    left = files_in(tmp_path / "run")
    assert not [name for name in left if "step-" in name or "config.toml." in name], left
    if "status.json" in left:
        assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
    with chdir(tmp_path):
        assert called("train run.toml").code == 0


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_disk_without_room(tmp_path: Path) -> None:
    write_good(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", small], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        command = [sys.executable, "-m", "mural", "train", "run.toml", "--folder", str(small / "run")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "No space left on device" in folded(done.stderr)
        assert "Traceback" not in done.stderr
        assert not list((small / "run").rglob("step-*"))
    finally:
        subprocess.run(["umount", small], check=True)


FORBIDDEN = [
    Bad("an image", "--folder mine/run", "images/1.tif: it cannot be read: Permission denied. Change its permissions"),
    Bad("a configuration", "train secret.toml", "secret.toml cannot be read: Permission denied"),
    Bad(
        "the run's folder", "--data.images images/0.tif --data.masks masks/0.tif", "choose a folder that you may write"
    ),
    Bad("an output", "convert images/0.tif a.ome.zarr", "Permission denied"),
    Bad(
        "a drawing", "graph mural.models:UNet --shape 1,3,64,64 --output a.html", "a.html cannot be written: Permission"
    ),
]


@pytest.fixture(scope="module")
def forbidden() -> Generator[Path]:
    """A folder in which little may be read and nothing written, and a process that is not root."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_good(folder)
        (folder / "secret.toml").write_text("")
        with chdir(folder):  # what is imported late is imported now
            for command in (
                "train run.toml --folder mine",
                "convert images/0.tif mine/a.ome.zarr",
                FORBIDDEN[-1].command,
            ):
                assert called(command).code == 0
            (folder / "a.html").unlink()
        (folder / "mine").chmod(0o777)
        (folder / "images/1.tif").chmod(0)
        (folder / "secret.toml").chmod(0)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        try:
            os.seteuid(65534 if root else os.geteuid())
            yield folder
        finally:
            os.seteuid(0 if root else os.geteuid())
            folder.chmod(0o755)


@pytest.mark.parametrize("bad", FORBIDDEN, ids=str)
def test_what_may_not_be_read_or_written(bad: Bad, forbidden: Path) -> None:
    before = files_in(forbidden)
    with chdir(forbidden):
        check(bad, called(f"train run.toml {bad.command}" if bad.command.startswith("-") else bad.command))
    assert {name for name in files_in(forbidden) - before if not name.endswith(".lock")} == set()
