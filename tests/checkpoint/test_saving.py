"""What a save writes: safetensors that come back bit for bit, without pickle, every damage noticed."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import mural
from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.files import as_bytes, damages, header, read_manifest, write_tensor
from mural.checkpoint.folder import step_path
from mural.checkpoint.manifest import DTYPES, Damaged
from mural.checkpoint.pieces import Piece
from mural.checkpoint.snapshot import open_snapshot
from mural.checkpoint.state import restore
from mural.errors import CheckpointError


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    bits = torch.randint(0, 2 if dtype == torch.bool else 120, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


TENSORS = {str(name): some(dtype, 3, 2) for name, dtype in DTYPES.items()}
TENSORS |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "strided": torch.rand(4, 6).t()[1:5, ::2]}
TENSORS |= {"conj": torch.rand(3, dtype=torch.complex64).conj(), "channels last": torch.rand(1, 3, 4, 4).contiguous(
    memory_format=torch.channels_last)}  # fmt: skip


def saved(folder: Path, tensors: Mapping[str, Any]) -> Path:
    """The place of a checkpoint of step 1."""
    checkpoints = Checkpoints(folder, mural.init(), asynchronous=False)
    try:
        checkpoints.save(1, tensors, {})
    finally:
        checkpoints.close()
    return step_path(folder, 1)


def test_every_type_and_layout_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved(tmp_path, TENSORS)
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    open_snapshot(tmp_path).load(found)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert as_bytes(found[name]) == as_bytes(tensor), name
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    place = saved(tmp_path, {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int8)})
    (path,) = place.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert torch.equal(file.get_tensor("a"), torch.arange(6.0).view(2, 3))


def test_every_type_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    kinds = {str(d): (d, (2, 3)) for d in DTYPES.values() if d not in (torch.complex64, torch.complex128)}
    tensors = {name: some(dtype, *shape) for name, (dtype, shape) in kinds.items()}
    with (tmp_path / "all.safetensors").open("wb") as file:
        file.write(header(kinds)[0])
        for tensor in tensors.values():
            write_tensor(file, tensor)
    with safe_open(tmp_path / "all.safetensors", "pt") as opened:
        for name, tensor in tensors.items():
            assert opened.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(opened.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))


def test_objects_are_refused_not_pickled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lr is a float, not a tensor"):
        saved(tmp_path, {"lr": 0.1})
    assert not step_path(tmp_path, 1).exists()


def faults(place: Path) -> list[str]:
    try:
        return list(damages(place, read_manifest(place)))
    except Damaged as damage:
        return [str(damage)]


class Trap:
    """Unpickling it would touch a file."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, ("trapped", "w"))


def test_a_pickle_in_any_file_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = saved(tmp_path, {"a": torch.arange(100)})
    buffer = io.BytesIO()
    torch.save(Trap(), buffer)
    for data in (pickle.dumps(Trap()), buffer.getvalue()):
        for path in place.iterdir():
            before = path.read_bytes()
            path.write_bytes(data)
            assert faults(place)
            path.write_bytes(before)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("where", [0, 9, 60, -1])
def test_any_flipped_byte_of_a_file_is_noticed(tmp_path: Path, where: int) -> None:
    place = saved(tmp_path, {"a": torch.arange(100)})
    path = place / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    (text,) = damages(place, read_manifest(place))
    assert "rank-00000.safetensors is damaged" in text
    assert "CRC-32" in text


def test_the_work_of_checking_is_shared(tmp_path: Path) -> None:
    place = saved(tmp_path, nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).state_dict())
    manifest = read_manifest(place)
    path = place / "rank-00000.safetensors"
    whole = path.read_bytes()
    for at in range(manifest.files[path.name].head, len(whole), 50):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        assert [len(list(damages(place, manifest, share, 3))) for share in range(3)].count(1) == 1


def test_a_file_that_grows_or_goes_is_noticed(tmp_path: Path) -> None:
    place = saved(tmp_path, {"a": torch.arange(100)})
    path, manifest = place / "rank-00000.safetensors", read_manifest(place)
    path.write_bytes(path.read_bytes() + b"more")
    assert "were written" in next(damages(place, manifest))
    path.write_bytes(path.read_bytes()[:-100])
    assert {"cut" in text for text in damages(place, manifest)} == {True}
    path.unlink()
    assert {"is missing" in text for text in damages(place, manifest)} == {True}


def test_a_checkpoint_of_two_ranks_that_an_earlier_version_wrote_loads(tmp_path: Path) -> None:
    """Written by mural 0.1.0.dev0 through torch.distributed.checkpoint; see decision 0028."""
    folder = shutil.copytree(Path(__file__).parent / "written_before", tmp_path / "run")
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    snapshot = open_snapshot(folder)
    restore(snapshot, model, optimizer, scheduler)
    assert (snapshot.step, snapshot.values["about"], scheduler.last_epoch) == (3, {"step": 3}, 3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert optimizer.state[model[0].weight]["step"] == model[1].num_batches_tracked == 3
    assert torch.equal(snapshot.tensor("cut"), torch.arange(60.0).view(10, 6))
    part = Piece(torch.zeros(4, 2), (10, 6), [(2, 6), (1, 3)])
    snapshot.load({"cut": part})
    assert torch.equal(part.tensor, torch.arange(60.0).view(10, 6)[2:6, 1:3])
