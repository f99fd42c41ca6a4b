"""The manifest: what is written is read again; what was changed, by chance or on purpose, is refused."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
import torch

from mural.checkpoint.manifest import Damaged, File, Manifest, StoredBlock, StoredTensor
from mural.geometry import Interval

FILE = File("rank-00000.safetensors", 200, 72, 5)
BLOCKS = (
    StoredBlock((Interval(0, 2), Interval(0, 3)), FILE.name, 72, 96, 1),
    StoredBlock((Interval(2, 4), Interval(0, 3)), FILE.name, 96, 120, 2),
)
MANIFEST = Manifest(
    7,
    {"mural": "1"},
    {FILE.name: FILE},
    {
        "w": StoredTensor(torch.float32, (4, 3), BLOCKS),
        "s": StoredTensor(torch.int64, (), (StoredBlock((), FILE.name, 120, 128, 3),)),
    },
    {"lr": 0.1, "best": float("inf"), "text": "ü", "nothing": None, "many": [1, True]},
)


def signed(change: Any) -> str:
    """The manifest with its body changed, and a CRC-32 that agrees: what an attacker would write."""
    found = json.loads(MANIFEST.dumps())
    change(found["body"])
    found["crc32"] = zlib.crc32(json.dumps(found["body"], separators=(",", ":")).encode())
    return json.dumps(found)


def test_what_is_written_is_read_again() -> None:
    assert Manifest.loads(MANIFEST.dumps()) == MANIFEST


def test_every_flipped_byte_is_noticed_or_without_effect() -> None:
    data = MANIFEST.dumps().encode()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x08
        try:
            found = Manifest.loads(changed.decode())
        except (Damaged, UnicodeDecodeError):
            continue
        assert found == MANIFEST, at


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not the manifest"),
        ('{"format": "other"}', "not the manifest"),
        ('{"format": "mural checkpoint", "schema": 99}', "has schema 99, but this version of mural reads schema 1"),
        ('{"format": "mural checkpoint", "schema": 1, "crc32": 0, "body": {}}', "does not match"),
    ],
)
def test_other_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        Manifest.loads(text)


def to_parent(body: Any) -> None:
    body["files"]["../secret.safetensors"] = body["files"].pop(FILE.name)


def beyond_the_file(body: Any) -> None:
    body["tensors"]["w"]["blocks"][0][2:4] = [180, 204]


def twice_the_same(body: Any) -> None:
    body["tensors"]["w"]["blocks"][1] = body["tensors"]["w"]["blocks"][0]


def outside_the_shape(body: Any) -> None:
    body["tensors"]["w"]["blocks"][1][0] = [[3, 5], [0, 3]]


def a_hole(body: Any) -> None:
    body["tensors"]["w"]["blocks"].pop()


def other_bytes(body: Any) -> None:
    body["tensors"]["w"]["blocks"][0][3] += 4


def other_type(body: Any) -> None:
    body["tensors"]["w"]["dtype"] = "object"


def negative(body: Any) -> None:
    body["tensors"]["w"]["shape"] = [-4, -3]


def nothing(body: Any) -> None:
    del body["tensors"]


@pytest.mark.parametrize(
    "change",
    [to_parent, beyond_the_file, twice_the_same, outside_the_shape, a_hole, other_bytes, other_type, negative, nothing],
)
def test_a_manifest_made_to_mislead_is_refused(change: Any) -> None:
    with pytest.raises(Damaged, match="malformed"):
        Manifest.loads(signed(change))
