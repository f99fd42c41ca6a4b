"""The files of a checkpoint: safetensors written and read by byte range, every range checked against its CRC-32."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mural.checkpoint.manifest import CODES, NAME, Damaged, File, Manifest, StoredBlock
from mural.errors import CheckpointError


def header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], **about: str
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The head of a safetensors file of these tensors in this order, and the range of each in the data after it."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    ranges: dict[str, tuple[int, int]] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = dtype.itemsize * torch.Size(shape).numel()
        pairs = dtype == torch.complex128
        code, extents = ("F64", [*shape, 2]) if pairs else (CODES.get(dtype), list(shape))
        if code is None:
            raise CheckpointError(f"{name} has the type {dtype}, which safetensors cannot hold: convert it first")
        ranges[name] = (at, at + size)
        described[name] = {"dtype": code, "shape": extents, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ranges


def write_tensor(file: BinaryIO, tensor: Tensor) -> int:
    """Write a tensor's bytes, and return their CRC-32."""
    data = as_bytes(tensor)
    file.write(data)
    return zlib.crc32(data)


def as_bytes(tensor: Tensor) -> memoryview:
    """The values of a tensor in host memory, without a copy where they are contiguous there."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _view(plain.reshape(-1).view(torch.uint8))


def _view(bytes: Tensor) -> memoryview:
    array: Any = bytes.numpy()
    return memoryview(array)


def read_manifest(place: Path) -> Manifest:
    """The manifest of a checkpoint; `Damaged` where there is none that can be trusted."""
    try:
        return Manifest.loads((place / NAME).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(_unreadable(place / NAME, error)) from error
    except Damaged as damage:
        raise Damaged(f"{place / NAME} {damage}") from damage


def read_block(place: Path, name: str, block: StoredBlock, dtype: torch.dtype) -> Tensor:
    """The values of a block of a tensor, which agree with their CRC-32."""
    path = place / block.file
    memory = torch.empty(block.stop - block.start, dtype=torch.uint8)
    view = _view(memory)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(block.start)
            count = 0
            while count < len(view) and (got := file.readinto(view[count:])):
                count += got
    except OSError as error:
        raise Damaged(_unreadable(path, error)) from error
    if count < len(view):
        raise Damaged(f"{path} ends at byte {block.start + count:,}, but {block.stop:,} were written: it was cut short")
    if zlib.crc32(view) != block.crc:
        raise Damaged(
            f"{path} is damaged: bytes {block.start:,} to {block.stop:,}, of {name}, do not match their CRC-32"
        )
    return memory.view(dtype).view([i.size for i in block.box])


def damages(place: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> Iterator[str]:
    """What is wrong with a checkpoint's files; of the bytes, one of several equal shares is looked at."""
    whole: set[str] = set()
    for file in manifest.files.values():
        fault = _fault(place / file.name, file)
        if fault:
            yield fault
        else:
            whole.add(file.name)
    done = 0
    total = sum(file.bytes - file.head for file in manifest.files.values())
    for name, entry in manifest.tensors.items():
        for block in entry.blocks:
            if block.file in whole and done * shares // max(total, 1) == share:
                try:
                    read_block(place, name, block, entry.dtype)
                except Damaged as damage:
                    yield str(damage)
            done += block.stop - block.start


def _fault(path: Path, file: File) -> str:
    """What is wrong with a file as a whole, if anything is."""
    try:
        with path.open("rb") as opened:
            head = opened.read(file.head)
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        return _unreadable(path, error)
    if size != file.bytes:
        return f"{path} has {size:,} bytes, but {file.bytes:,} were written: it was cut or changed"
    return "" if zlib.crc32(head) == file.crc else f"{path} is damaged: its header does not match its CRC-32"


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} is missing (looked for on {socket.gethostname()})"
    return f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
