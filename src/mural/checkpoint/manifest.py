"""The manifest: what a checkpoint holds, as JSON that reading cannot turn into running code.

    {"format": "mural checkpoint", "schema": 1, "crc32": of the body,
     "body": {"step", "written", "files", "tensors", "values"}}

A tensor is a type, a shape, and disjoint blocks that cover it; a block is a box, the bytes of a file, and their CRC-32.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import torch

from mural.errors import DISTRIBUTION, CheckpointError
from mural.geometry import Box, Interval, disjoint, volume

NAME = "checkpoint.json"
FORMAT = "mural checkpoint"
SCHEMA = 1

CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""What safetensors calls torch's types."""

# safetensors has no complex128: its file then holds pairs of float64, and the manifest says what they are.
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, torch.complex128)}


class Damaged(CheckpointError):
    """A part of a checkpoint is missing, or is not what was written."""


@dataclass(frozen=True)
class File:
    """A safetensors file: its name in the checkpoint's folder, its size, and its header's size and CRC-32."""

    name: str
    bytes: int
    head: int
    crc: int


@dataclass(frozen=True)
class StoredBlock:
    """A box of a tensor: the file, the range of its bytes there, and their CRC-32."""

    box: Box
    file: str
    start: int
    stop: int
    crc: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint but the tensors' bytes."""

    step: int
    written: Mapping[str, str]
    files: Mapping[str, File]
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]

    def dumps(self) -> str:
        """The JSON text."""
        body = {
            "step": self.step,
            "written": dict(self.written),
            "files": {file.name: [file.bytes, file.head, file.crc] for file in self.files.values()},
            "tensors": {name: _pack(entry) for name, entry in self.tensors.items()},
            "values": self.values,
        }
        text = _canonical(body)
        crc = zlib.crc32(text.encode())
        return f'{{"format": "{FORMAT}", "schema": {SCHEMA}, "crc32": {crc},\n"body": {text}}}\n'

    @classmethod
    def loads(cls, text: str) -> Manifest:
        """The manifest of a JSON text, every field checked; `Damaged` says what is wrong with it."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Damaged(f"is damaged: it is not JSON ({error})") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:  # type: ignore[reportUnknownMemberType]
            raise Damaged("is not the manifest of a mural checkpoint")
        if found.get("schema") != SCHEMA:
            raise Damaged(
                f"has schema {found.get('schema')!r}, but this version of mural reads schema {SCHEMA}: use the version "
                f"that wrote it"
            )
        if found.get("crc32") != zlib.crc32(_canonical(found.get("body")).encode()):
            raise Damaged("is damaged: its CRC-32 does not match its content")
        try:
            return _unpack(found["body"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"is malformed: {type(error).__name__}: {error}") from error


def mural_version() -> str:
    """The version of mural that writes."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"  # run from its sources


def _canonical(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"))


def _pack(entry: StoredTensor) -> dict[str, Any]:
    blocks = [[[list(i) for i in b.box], b.file, b.start, b.stop, b.crc] for b in entry.blocks]
    return {"dtype": str(entry.dtype).removeprefix("torch."), "shape": list(entry.shape), "blocks": blocks}


def _unpack(body: Mapping[str, Any]) -> Manifest:
    files = {name: File(name, *_whole(*numbers)) for name, numbers in body["files"].items()}
    for file in files.values():
        # The name is joined to the folder: nothing in a manifest may lead out of it.
        if not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", file.name) or not 8 <= file.head <= file.bytes:
            raise ValueError(f"the file {file.name!r} of {file.bytes} bytes, {file.head} of them header")
    tensors = {name: _entry(name, packed, files) for name, packed in body["tensors"].items()}
    (step,) = _whole(body["step"])
    return Manifest(step, {str(k): str(v) for k, v in body["written"].items()}, files, tensors, dict(body["values"]))


def _entry(name: str, packed: Mapping[str, Any], files: Mapping[str, File]) -> StoredTensor:
    dtype, shape = DTYPES[packed["dtype"]], _whole(*packed["shape"])
    blocks: list[StoredBlock] = []
    for box, file, *numbers in packed["blocks"]:
        block = StoredBlock(tuple(Interval(*_whole(*pair)) for pair in box), file, *_whole(*numbers))
        inside = len(block.box) == len(shape) and all(
            i.start <= i.stop <= n for i, n in zip(block.box, shape, strict=True)
        )
        held = files[file].head <= block.start and block.stop <= files[file].bytes
        if not inside or not held or block.stop - block.start != volume(block.box) * dtype.itemsize:
            raise ValueError(f"a block of {name} does not fit its shape {shape} or its file")
        blocks.append(block)
    boxes = [block.box for block in blocks]
    if not disjoint(boxes) or sum(map(volume, boxes)) != prod(shape):
        raise ValueError(f"the blocks of {name} do not make up its shape {shape}")
    return StoredTensor(dtype, shape, tuple(blocks))


def _whole(*numbers: Any) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers} are not whole numbers")
    return numbers
