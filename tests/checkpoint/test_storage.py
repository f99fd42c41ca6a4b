"""The storage under `torch.distributed.checkpoint`: its own `save` and `load` work with it, without pickle."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from mural.checkpoint.files import as_bytes, damages, header, read_manifest, write_tensor
from mural.checkpoint.manifest import DTYPES, Damaged
from mural.checkpoint.storage import Reader, Writer


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    bits = torch.randint(0, 2 if dtype == torch.bool else 120, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


TENSORS = {str(name): some(dtype, 3, 2) for name, dtype in DTYPES.items()}
TENSORS |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "strided": torch.rand(4, 6).t()[1:5, ::2]}
TENSORS |= {"conj": torch.rand(3, dtype=torch.complex64).conj(), "channels last": torch.rand(1, 3, 4, 4).contiguous(
    memory_format=torch.channels_last)}  # fmt: skip


def test_save_and_load_of_torch_work_with_it(tmp_path: Path) -> None:
    dcp.save(dict(TENSORS), storage_writer=Writer(tmp_path / "step-1", 1), no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, storage_reader=Reader(tmp_path / "step-1"), no_dist=True)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert as_bytes(found[name]) == as_bytes(tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int8)},
        storage_writer=Writer(tmp_path / "s", 1),
    )
    (path,) = (tmp_path / "s").glob("*.safetensors")
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
    with pytest.raises(CheckpointException, match="no tensor"):
        dcp.save({"lr": 0.1}, storage_writer=Writer(tmp_path / "s", 1), no_dist=True)
    assert not (tmp_path / "s").exists()


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
    place = tmp_path / "s"
    dcp.save({"a": torch.arange(100)}, storage_writer=Writer(place, 1), no_dist=True)
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
    place = tmp_path / "s"
    dcp.save({"a": torch.arange(100)}, storage_writer=Writer(place, 1), no_dist=True)
    path = place / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    (text,) = damages(place, read_manifest(place))
    assert "rank-00000.safetensors is damaged" in text
    assert "CRC-32" in text


def test_the_work_of_checking_is_shared(tmp_path: Path) -> None:
    place = tmp_path / "s"
    dcp.save(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).state_dict(), storage_writer=Writer(place, 1), no_dist=True
    )
    manifest = read_manifest(place)
    path = place / "rank-00000.safetensors"
    whole = path.read_bytes()
    for at in range(manifest.files[path.name].head, len(whole), 50):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        assert [len(list(damages(place, manifest, share, 3))) for share in range(3)].count(1) == 1


def test_a_file_that_grows_or_goes_is_noticed(tmp_path: Path) -> None:
    place = tmp_path / "s"
    dcp.save({"a": torch.arange(100)}, storage_writer=Writer(place, 1), no_dist=True)
    path, manifest = place / "rank-00000.safetensors", read_manifest(place)
    path.write_bytes(path.read_bytes() + b"more")
    assert "were written" in next(damages(place, manifest))
    path.write_bytes(path.read_bytes()[:-100])
    assert {"cut" in text for text in damages(place, manifest)} == {True}
    path.unlink()
    assert {"is missing" in text for text in damages(place, manifest)} == {True}
