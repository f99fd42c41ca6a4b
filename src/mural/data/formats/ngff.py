"""The metadata of a Zarr folder: arrays, groups, and the multiscales of OME-Zarr 0.4 and 0.5."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mural.errors import DataError

Json = dict[str, Any]


@dataclass(frozen=True)
class ZarrNode:
    """An array or group of a Zarr folder."""

    path: Path
    version: int
    is_array: bool
    attributes: Json
    names: tuple[str, ...] | None = None
    """The names of an array's dims, where it has them."""


def read_json(path: Path) -> Json | None:
    """A file's JSON object; None where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: it is not valid JSON ({error}): it is damaged; write the array again", str(path)
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: it does not hold a JSON object: it is damaged; write the array again", str(path))
    return found


def node(path: Path) -> ZarrNode | None:
    """What a folder says that it is; None where it says nothing."""
    third = read_json(path / "zarr.json")
    if third is not None:
        names = third.get("dimension_names")
        whole = tuple(names) if names and all(isinstance(n, str) for n in names) else None
        return ZarrNode(path, 3, third.get("node_type") == "array", third.get("attributes") or {}, whole)
    for name, is_array in ((".zarray", True), (".zgroup", False)):
        if read_json(path / name) is not None:
            attributes = read_json(path / ".zattrs") or {}
            names = attributes.get("_ARRAY_DIMENSIONS")
            return ZarrNode(path, 2, is_array, attributes, tuple(names) if names else None)
    return None


def multiscales(found: ZarrNode) -> list[Json]:
    """The multiscales of a group, under `ome` since version 0.5."""
    ome = found.attributes.get("ome")
    listed = (ome if isinstance(ome, dict) else found.attributes).get("multiscales")
    return listed if isinstance(listed, list) else []


def axis_names(scale: Json) -> tuple[str, ...] | None:
    """The names of the dims of a multiscale; before version 0.4 they were plain words, or the five of tczyx."""
    axes = scale.get("axes")
    if not isinstance(axes, list):
        return None
    return tuple(axis["name"] if isinstance(axis, dict) else str(axis) for axis in axes)


def arrays_below(path: Path, depth: int = 3) -> list[str]:
    """The arrays and images inside a folder, as keys, for a message."""
    found: list[str] = []
    for child in sorted(path.iterdir()) if depth else ():
        inner = node(child) if child.is_dir() else None
        if inner is not None and (inner.is_array or multiscales(inner)):
            found.append(child.name)
        elif child.is_dir():
            found += [f"{child.name}/{rest}" for rest in arrays_below(child, depth - 1)]
    return found


def group_metadata(
    name: str, axes: str, scales: list[tuple[float, ...]], method: str, spacing: tuple[float, ...] = ()
) -> Json:
    """The zarr.json of an OME-Zarr 0.5 group whose levels are called 0, 1, …; `spacing` is a pixel's in micrometers.

    A mean of f pixels is in their middle, (f - 1) / 2 after the first; a nearest pixel is the first itself.
    """
    kinds = {"c": "channel", "z": "space", "y": "space", "x": "space"}
    datasets: list[Json] = []
    sizes = (*(1.0,) * (len(axes) - len(spacing)), *spacing)
    unit: Json = {"unit": "micrometer"}
    known = axes[len(axes) - len(spacing) :]
    for level, factors in enumerate(scales):
        moved = [s * (f - 1) / 2 if method == "mean" else 0.0 for f, s in zip(factors, sizes, strict=True)]
        scale = [f * s for f, s in zip(factors, sizes, strict=True)]
        shift: list[Json] = [{"type": "translation", "translation": moved}] if any(moved) else []
        transforms: list[Json] = [{"type": "scale", "scale": scale}, *shift]
        datasets.append({"path": str(level), "coordinateTransformations": transforms})
    multiscale = {
        "name": name,
        "axes": [{"name": axis, "type": kinds[axis]} | (unit if axis in known else {}) for axis in axes],
        "datasets": datasets,
        "type": method,
    }
    ome = {"version": "0.5", "multiscales": [multiscale]}
    return {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}
