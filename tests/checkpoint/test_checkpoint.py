"""Checkpoints of a run: asynchronous, atomic, plan-free, and clear about what is wrong with one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mural
import mural.checkpoint.saving as saving
from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.folder import step_path
from mural.checkpoint.pieces import Piece
from mural.checkpoint.snapshot import open_snapshot
from mural.errors import CheckpointError
from mural.geometry import Cuts, whole
from ranks import run_on

SHAPES = {"w": (70, 5), "v": (3, 41, 2), "s": (), "e": (0, 3), "big": (600, 1100)}


def state(step: int) -> dict[str, Tensor]:
    """Tensors that say which step they are of."""
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
    return tensors | {"count": torch.tensor(step), "half": torch.full((9,), step, dtype=torch.bfloat16)}


def mesh() -> mural.Mesh:
    return mural.init(data=dist.get_world_size() if dist.is_initialized() else 1)


def cut(tensors: dict[str, Tensor], uneven: bool) -> dict[str, Tensor | Piece]:
    """Some of the tensors as pieces along one dim, unevenly, with ranks that hold nothing; the others full."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pieces: dict[str, Tensor | Piece] = dict(tensors)
    for name, dim in (("w", 0), ("v", 1), ("big", 1)):
        weights = [(r * 7 % 4) + (r == 0) for r in range(world)] if uneven else [1] * world
        box = list(whole(tensors[name].shape))
        box[dim] = Cuts.weighted(box[dim].size, weights).interval(rank)
        part = tensors[name][tuple(slice(*i) for i in box)].clone()
        pieces[name] = Piece(part, tuple(tensors[name].shape), box)
    return pieces


def save_on_ranks(folder: str, step: int, pieces: bool) -> list[int]:
    checkpoints = Checkpoints(folder, mesh())
    checkpoints.save(step, cut(state(step), True) if pieces else state(step), {"step": step, "rank": dist.get_rank()})
    checkpoints.wait()
    checkpoints.close()
    return checkpoints.steps()


def load_on_ranks(folder: str, step: int, pieces: bool) -> dict[str, Any]:
    checkpoints = Checkpoints(folder, mesh())
    snapshot = checkpoints.read()
    blank = {name: torch.full_like(tensor, 77) for name, tensor in state(step).items()}
    expected = cut(state(step), False) if pieces else state(step)
    targets = cut(blank, False) if pieces else blank
    snapshot.load(targets)
    for name, target in targets.items():
        want = expected[name]
        assert torch.equal(*(x.tensor if isinstance(x, Piece) else x for x in (target, want))), name
    assert torch.equal(snapshot.tensor("w", [(3, 60), (1, 4)]), state(step)["w"][3:60, 1:4])
    checkpoints.close()
    assert snapshot.step == step
    return dict(snapshot.values)


WORLDS = [
    (1, 2), (2, 1), (2, 4), (4, 2),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 2), (1, 1), (4, 1), (1, 4), (4, 4))),
]  # fmt: skip


@pytest.mark.parametrize(("writers", "readers"), WORLDS)
@pytest.mark.parametrize("pieces", [False, True])
def test_any_number_of_ranks_reads_what_any_other_wrote(
    tmp_path: Path, writers: int, readers: int, pieces: bool
) -> None:
    assert run_on(writers, save_on_ranks, str(tmp_path), 5, pieces) == [[5]] * writers
    found = run_on(readers, load_on_ranks, str(tmp_path), 5, not pieces)
    assert found == [{"step": 5, "rank": 0}] * readers


def written_bytes(folder: str) -> tuple[int, int]:
    checkpoints = Checkpoints(folder, mesh())
    tensors = {"a": torch.rand(3 * 2**20), "b": torch.rand(5), "c": torch.rand(2**20)}
    checkpoints.save(1, tensors, {})
    held = checkpoints.staging.buffer
    checkpoints.save(2, tensors, {})
    checkpoints.wait()
    checkpoints.close()
    assert checkpoints.staging.buffer is held  # used again
    return held.memory.nbytes, sum(tensor.nbytes for tensor in tensors.values())


def test_each_rank_copies_and_writes_its_share_only(tmp_path: Path) -> None:
    found = run_on(2, written_bytes, str(tmp_path))
    assert sum(copied for copied, _ in found) == found[0][1]
    assert all(abs(copied - total / 2) < 2**21 for copied, total in found)
    sizes = [path.stat().st_size for path in step_path(tmp_path, 2).glob("*.safetensors")]
    assert len(sizes) == 2
    assert sum(sizes) < found[0][1] + 4096


def train_beside(folder: str) -> tuple[float, bool, list[int]]:
    """Collectives and halo exchanges of the training while both ranks' threads write and agree."""
    grid = mural.init(spatial=(2, 1))
    checkpoints = Checkpoints(folder, grid)
    write = saving.write_tensor
    with pytest.MonkeyPatch.context() as patch:
        slow = 0.05 * dist.get_rank()
        patch.setattr(saving, "write_tensor", lambda *a: (time.sleep(slow), write(*a))[1])
        checkpoints.save(1, state(1), {})
        total, image = torch.zeros(1), mural.shard(torch.ones(1, 1, 16, 16), grid)
        beside = 0
        for step in range(60):
            beside += checkpoints.writing is not None and checkpoints.writing.running()
            one = torch.full((1,), float(step))
            dist.all_reduce(one)
            total += one
            image = torch.nn.functional.avg_pool2d(image, 3, 1, 1, count_include_pad=False)
        checkpoints.wait()
    checkpoints.close()
    return float(total), bool((image.full() - 1).abs().max() < 1e-6) and beside > 0, checkpoints.steps()


def test_its_messages_never_meet_those_of_the_training(tmp_path: Path) -> None:
    assert run_on(2, train_beside, str(tmp_path)) == [(60.0 * 59, True, [1])] * 2


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path / "run", mural.init(), keep=2)
    yield made
    made.close()


def saved(checkpoints: Checkpoints, *steps: int) -> Path:
    for step in steps:
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.wait()
    return checkpoints.folder


def loads(checkpoints: Checkpoints, step: int | None = None) -> int:
    """The step that is read, all tensors of which are of that step."""
    snapshot = checkpoints.read(step)
    targets = {name: torch.full_like(tensor, 77) for name, tensor in state(0).items()}
    snapshot.load(targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in state(snapshot.step).items())
    assert snapshot.values == {"step": snapshot.step}
    return snapshot.step


def test_the_last_few_are_kept(checkpoints: Checkpoints) -> None:
    folder = saved(checkpoints, 1, 2, 10)
    assert checkpoints.steps() == [2, 10]
    assert checkpoints.latest() == 10
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000002", "step-00000010"]
    assert (loads(checkpoints), loads(checkpoints, 2)) == (10, 2)


def test_nothing_is_there_at_first(checkpoints: Checkpoints) -> None:
    assert checkpoints.steps() == []
    assert checkpoints.latest() is None
    with pytest.raises(CheckpointError, match=r"run holds no checkpoint$"):
        checkpoints.read()
    saved(checkpoints, 3)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 4, but of steps 3"):
        checkpoints.read(4)


def test_training_may_go_on_while_it_is_written(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = saving.write_tensor
    monkeypatch.setattr(saving, "write_tensor", lambda *a: (go.wait(10), write(*a))[1])
    tensors, values = state(4), {"step": 4}
    checkpoints.save(4, tensors, values)
    for tensor in tensors.values():
        tensor.zero_()
    values["step"] = 5
    assert checkpoints.steps() == []
    go.set()
    checkpoints.wait()
    assert loads(checkpoints) == 4


def test_a_second_save_waits_for_the_first(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saving.write_tensor
    monkeypatch.setattr(saving, "write_tensor", lambda *a: (time.sleep(0.02), write(*a))[1])
    checkpoints.save(1, state(1), {})
    checkpoints.save(2, state(2), {})
    assert checkpoints.steps() == [1]


def test_without_a_thread_it_is_there_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, mural.init(), asynchronous=False)
    checkpoints.save(1, state(1), {})
    assert checkpoints.steps() == [1]
    checkpoints.close()


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_of_the_thread_comes_with_the_next_call(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(checkpoints, 1)
    with monkeypatch.context() as broken:
        broken.setattr(saving, "write_tensor", full)
        checkpoints.save(2, state(2), {"step": 2})
        with pytest.raises(
            CheckpointError, match=r"step 2 was not saved: .*No space left .* free\); step 1 is complete"
        ):
            checkpoints.wait()
        checkpoints.save(2, state(2), {"step": 2})
        with pytest.raises(CheckpointError, match="step 2 was not saved"):
            checkpoints.save(3, state(3), {"step": 3})
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000001"]
    saved(checkpoints, 3)
    assert loads(checkpoints) == 3


def test_a_step_saved_again_replaces_the_old_one(checkpoints: Checkpoints) -> None:
    saved(checkpoints, 1, 2)
    checkpoints.save(2, state(2) | {"more": torch.ones(3)}, {"step": 2})
    checkpoints.wait()
    assert "more" in checkpoints.read(2).tensors


def test_a_step_back_leaves_the_newer_ones(checkpoints: Checkpoints, tmp_path: Path) -> None:
    saved(checkpoints, 10, 20)
    checkpoints.close()
    fresh = Checkpoints(tmp_path / "run", mural.init())
    with pytest.raises(CheckpointError, match="already holds step 20, and this run would save step 15"):
        fresh.save(15, state(15), {})
    assert fresh.read(10).step == 10
    fresh.save(15, state(15), {"step": 15})
    fresh.wait()
    assert fresh.steps() == [10, 15]  # 20 is of a past that this run left
    fresh.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, {}, {}), "step=-1"),
        ((1.5, {}, {}), "step=1.5"),
        ((1, {}, {"a": {"b": [1, (2, 3)]}}), r"values\['a'\]\['b'\]\[1\] is a tuple"),
        ((1, {}, {"t": torch.ones(1)}), "values\\['t'\\] is a Tensor.*among the tensors"),
        ((1, {}, {"d": {1: 2}}), "values\\['d'\\] has the key 1"),
        ((1, {"m": torch.ones(2, device="meta")}, {}), "m is on the meta device"),
    ],
)
def test_what_cannot_be_saved_is_refused(checkpoints: Checkpoints, arguments: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        checkpoints.save(*arguments)
    saved(checkpoints, 3)


def test_sharded_tensors_are_given_as_pieces(checkpoints: Checkpoints) -> None:
    x = mural.shard(torch.rand(1, 1, 4, 4), mural.init(spatial=(1, 1)))
    with pytest.raises(CheckpointError, match=r"x is a ShardedTensor: give Piece"):
        checkpoints.save(1, {"x": x}, {})
    checkpoints.save(1, {"x": Piece(x.local, tuple(x.shape), x.box)}, {})
    assert torch.equal(checkpoints.read().tensor("x"), x.local)


def test_keep_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=0"):
        Checkpoints(tmp_path, mural.init(), keep=0)


# --- damage ----------------------------------------------------------------------------------------------------------


def no_manifest(place: Path) -> str:
    (place / "checkpoint.json").unlink()
    return "checkpoint.json is missing"


def no_file(place: Path) -> str:
    (place / "rank-00000.safetensors").unlink()
    return "rank-00000.safetensors is missing"


def truncated(place: Path) -> str:
    path = place / "rank-00000.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return "rank-00000.safetensors has [0-9,]+ bytes, but [0-9,]+ were written"


def flipped(place: Path) -> str:
    path = place / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3000] ^= 4
    path.write_bytes(data)
    return "rank-00000.safetensors is damaged: bytes [0-9,]+ to [0-9,]+, of big, do not match their CRC-32"


def flipped_manifest(place: Path) -> str:
    path = place / "checkpoint.json"
    path.write_text(path.read_text().replace('"float32"', '"float16"', 1))
    return "checkpoint.json is damaged: its CRC-32 does not match"


def half_a_manifest(place: Path) -> str:
    path = place / "checkpoint.json"
    os.truncate(path, path.stat().st_size // 2)
    return "checkpoint.json is damaged: it is not JSON"


def later_schema(place: Path) -> str:
    path = place / "checkpoint.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2', 1))
    return "checkpoint.json has schema 2, but this version of mural reads schema 1"


def binary_manifest(place: Path) -> str:
    (place / "checkpoint.json").write_bytes(b"\xff\xfe\x00")
    return "checkpoint.json cannot be read"


def a_folder_for_a_file(place: Path) -> str:
    (place / "rank-00000.safetensors").unlink()
    (place / "rank-00000.safetensors").mkdir()
    return "rank-00000.safetensors cannot be read: Is a directory"


DAMAGES = [
    no_manifest,
    no_file,
    truncated,
    flipped,
    flipped_manifest,
    half_a_manifest,
    later_schema,
    binary_manifest,
    a_folder_for_a_file,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over(checkpoints: Checkpoints, damage: Any) -> None:
    saved(checkpoints, 1, 2)
    words = damage(step_path(checkpoints.folder, 2))
    with pytest.raises(CheckpointError, match=f"{words}.*; step 1 is intact: read that one"):
        checkpoints.read(2)
    snapshot = checkpoints.read()
    assert snapshot.step == 1
    (text,) = snapshot.passed_over
    assert text.startswith("step 2 was passed over: ")
    assert loads(checkpoints) == 1
    damage(step_path(checkpoints.folder, 1))
    with pytest.raises(CheckpointError, match="no older one that is intact"):
        checkpoints.read(2)
    with pytest.raises(CheckpointError, match=f"no intact checkpoint: step 2 was .*{words}.*; step 1 was .*{words}"):
        checkpoints.read()


def test_a_copy_under_another_number_is_passed_over(checkpoints: Checkpoints) -> None:
    folder = saved(checkpoints, 1)
    shutil.copytree(step_path(folder, 1), step_path(folder, 9))
    snapshot = checkpoints.read()
    assert snapshot.step == 1
    assert "step-00000009 holds step 1: it was renamed, or copied" in snapshot.passed_over[0]


def damaged_on_ranks(folder: str) -> tuple[int, str, str]:
    checkpoints = Checkpoints(folder, mesh())
    snapshot = checkpoints.read()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.read(2)
    checkpoints.close()
    return snapshot.step, snapshot.passed_over[0], str(caught.value)


def test_every_rank_hears_of_damage_that_one_of_them_saw(tmp_path: Path) -> None:
    run_on(2, save_on_ranks, str(tmp_path), 1, False)
    run_on(2, save_on_ranks, str(tmp_path), 2, False)
    path = step_path(tmp_path, 2) / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = run_on(2, damaged_on_ranks, str(tmp_path))
    assert found[0] == found[1]
    assert found[0][0] == 1
    assert "rank-00001.safetensors is damaged" in found[0][1]


def other_tensors(folder: str) -> tuple[str, bool]:
    checkpoints = Checkpoints(folder, mesh())
    targets = {name: torch.full_like(tensor, 77) for name, tensor in state(1).items()}
    if dist.get_rank() == 1:
        targets |= {"wv": torch.zeros(1), "s": torch.zeros(2), "count": torch.tensor(1.0)}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.read().load(targets)
    checkpoints.close()
    return str(caught.value), all((t == 77).all() for name, t in targets.items() if name not in ("wv", "s", "count"))


def test_nothing_is_changed_unless_it_fits_on_every_rank(tmp_path: Path) -> None:
    run_on(2, save_on_ranks, str(tmp_path), 1, False)
    (text, untouched), other = run_on(2, other_tensors, str(tmp_path))
    assert (text, untouched) == other
    assert untouched
    assert text.startswith("on rank 1: ")
    assert "s has the shape () there, but (2,) here" in text
    assert "count has the type torch.int64 there, but torch.float32 here" in text
    assert "wv is not there (nearest: " in text


def failing_on_one_rank(folder: str, kind: str) -> list[str]:
    checkpoints = Checkpoints(folder, mesh())
    heard: list[str] = []
    if checkpoints.latest():
        checkpoints.read()

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            if kind == "write":
                patch.setattr(saving, "write_tensor", refuse)
            if kind == "copy":
                patch.setattr(checkpoints.staging, "copy", refuse)
        values = {"v": (1,)} if kind == "values" and dist.get_rank() == 1 else {}
        step = 3 if kind == "step" and dist.get_rank() == 1 else 2
        for _ in range(2):
            try:
                checkpoints.save(step, state(2), values)
                checkpoints.wait()
            except CheckpointError as error:
                heard.append(str(error))
    checkpoints.save(5, state(5), {})
    checkpoints.wait()
    checkpoints.close()
    return [*heard, str(checkpoints.steps())]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("write", "step 2 was not saved: on rank 1: .*rank-00001.safetensors could not be written: No space left"),
        ("copy", "on rank 1: OSError.*No space left"),
        ("values", r"on rank 1: values\['v'\] is a tuple"),
        ("step", "the ranks save different steps at the same time: {0: 2, 1: 3}"),
    ],
)
def test_a_failure_on_one_rank_is_one_on_all(tmp_path: Path, kind: str, words: str) -> None:
    run_on(2, save_on_ranks, str(tmp_path), 1, False)
    first, second = run_on(2, failing_on_one_rank, str(tmp_path), kind)
    assert first == second
    assert len(first) == 3
    assert all(re.search(words, text) for text in first[:2]), first
    assert first[2] == "[1, 5]"
    assert not list(tmp_path.glob(".step-*"))


def on_another_disk(folder: str) -> tuple[str, str]:
    """What is said when rank 1 sees another folder than rank 0."""
    checkpoints = Checkpoints(folder, mesh())
    snapshot = checkpoints.read()
    if dist.get_rank() == 1:
        checkpoints.folder = Path(f"{folder}-of-rank-1")
    with pytest.raises(CheckpointError) as unread:
        checkpoints.read()
    checkpoints.save(snapshot.step + 1, state(2), {})
    with pytest.raises(CheckpointError) as unsaved:
        checkpoints.wait()
    checkpoints.close()
    return str(unread.value), str(unsaved.value)


def test_all_ranks_need_to_see_the_folder(tmp_path: Path) -> None:
    run_on(2, save_on_ranks, str(tmp_path / "run"), 1, False)
    (unread, unsaved), (_, other) = run_on(2, on_another_disk, str(tmp_path / "run"))
    assert unsaved == other
    assert "run-of-rank-1/step-00000001/rank-00000.safetensors is missing (looked for on " in unread
    assert unsaved.startswith("step 2 was not saved: on rank 1: ")
    assert "all ranks need to see the folder of checkpoints; step 1 is complete" in unsaved


# --- the folder ------------------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_save_are_cleaned(checkpoints: Checkpoints) -> None:
    folder = saved(checkpoints, 1, 2)
    step_path(folder, 2).rename(folder / ".step-00000002.saving")  # complete, but killed before it got its name
    (folder / ".step-00000003.saving").mkdir()
    (folder / ".step-00000003.saving" / "rank-00000.safetensors").write_bytes(b"half")
    (folder / ".step-00000000.gone").mkdir()
    (folder / "notes.txt").write_text("the user's own")
    checkpoints.close()
    again = Checkpoints(folder, mural.init())
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "notes.txt", "step-00000001", "step-00000002"]
    assert loads(again) == 2
    again.close()


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*run: (File exists|Not a directory)"):
        Checkpoints(tmp_path / "run", mural.init())


def test_a_folder_that_goes_away_during_training(checkpoints: Checkpoints) -> None:
    folder = saved(checkpoints, 1)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    folder.write_text("a file now")
    checkpoints.save(2, state(2), {})
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*; there is no complete checkpoint"):
        checkpoints.wait()


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=6m"):
        checkpoints = Checkpoints(tmp_path / "disk" / "run", mural.init())
        saved(checkpoints, 1)
        (tmp_path / "disk" / "other").write_bytes(bytes(2 * 2**20))
        checkpoints.save(2, state(2), {"step": 2})
        with pytest.raises(
            CheckpointError, match=r"No space left on device \(2\.6 MB to write, .* MB free\); step 1 is"
        ):
            checkpoints.wait()
        assert loads(checkpoints) == 1
        (tmp_path / "disk" / "other").unlink()
        saved(checkpoints, 2)
        assert loads(checkpoints) == 2
        checkpoints.close()


def test_a_read_only_folder(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m"):
        checkpoints = Checkpoints(tmp_path / "disk" / "run", mural.init())
        saved(checkpoints, 1)
        checkpoints.save(2, state(2), {"step": 2})
        checkpoints.wait()
        checkpoints.close()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        with pytest.raises(CheckpointError, match=r"cannot be written to .*: Read-only file system"):
            Checkpoints(tmp_path / "disk" / "run", mural.init())
        assert open_snapshot(tmp_path / "disk" / "run").step == 2  # reading needs no lock


def test_one_run_per_folder(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, mural, mural.checkpoint.folder as f, mural.checkpoint.checkpoints as c\n"
        "f.Lock.__init__.__defaults__ = (0.3,)\n"
        "c.Checkpoints(sys.argv[1], mural.init())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(checkpoints.folder)], capture_output=True, text=True, timeout=90
    )
    assert f"run is in use by process {os.getpid()} on " in run.stderr
    assert run.stderr.strip().endswith("end that run, or give this one a folder of its own")


def test_removal_that_fails_is_told(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    import mural.checkpoint.checkpoints as module

    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    saved(checkpoints, 1, 2)
    with monkeypatch.context() as broken:
        broken.setattr(module, "remove", refuse)
        checkpoints.save(3, state(3), {"step": 3})
        with pytest.raises(CheckpointError, match=r"^step 3 was saved, but others could not be removed"):
            checkpoints.wait()
    assert loads(checkpoints) == 3
