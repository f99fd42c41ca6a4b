"""Export: the model of a checkpoint as one safetensors file, which needs neither mural nor the run to be read."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from mural.checkpoint.files import header, write_tensor
from mural.checkpoint.folder import steps_in, sync_folder
from mural.checkpoint.manifest import CODES, mural_version
from mural.checkpoint.snapshot import Snapshot, open_snapshot
from mural.errors import CheckpointError

PREFIX = "model."


def export(source: Path | str, out: Path | str, step: int | None = None) -> Snapshot:
    """Write the model's state dict from a folder of checkpoints, or from one of them; the snapshot that it came from.

    The names are the plain model's: `model.load_state_dict(safetensors.torch.load_file(out))`; what belongs to the
    loss is left out. One tensor at a time is in memory. The file appears whole, or not at all.
    """
    source, out = Path(source), Path(out)
    snapshot = _opened(source, step)
    about_model: dict[str, Any] = snapshot.values.get("model", {})
    names = {name.removeprefix(PREFIX): name for name in snapshot.tensors if name.startswith(PREFIX)}
    names |= {name: PREFIX + first for name, first in about_model.get("ties", {}).items()}
    names = {name: place for name, place in names.items() if name not in about_model.get("loss", ())}
    if not names:
        raise CheckpointError(f"{snapshot.place} holds no model, whose tensors would be named {PREFIX}…")
    order = sorted(names, key=lambda name: (-snapshot.tensors[names[name]].dtype.itemsize, name))
    kinds = {name: (snapshot.tensors[names[name]].dtype, snapshot.tensors[names[name]].shape) for name in order}
    for name, (dtype, _) in kinds.items():
        if dtype not in CODES:
            raise CheckpointError(
                f"{name} has the type {dtype}, which safetensors does not know: it cannot be exported"
            )
    about = {"step": str(snapshot.step), "mural": mural_version()}
    extra = about_model.get("extra")
    head, _ = header(kinds, **about, **({"extra_state": json.dumps(extra)} if extra else {}))
    beside = out.with_name(f".{out.name}.saving")
    try:
        with beside.open("wb") as file:
            file.write(head)
            for name in order:
                write_tensor(file, snapshot.tensor(names[name]))
            file.flush()
            os.fsync(file.fileno())
        beside.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: {error.strerror}: name a file in a folder that exists"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return snapshot


def _opened(source: Path, step: int | None) -> Snapshot:
    """The snapshot in a folder of checkpoints, of a run that has one, or in the folder of one step."""
    if source.name.startswith("step-") and source.name.removeprefix("step-").isdigit():
        return open_snapshot(source.parent, step=int(source.name.removeprefix("step-")))
    inner = source / "checkpoints"
    if not steps_in(source) and not steps_in(inner):
        raise CheckpointError(f"{source} holds no checkpoint: give the folder of a run, as runs/run")
    return open_snapshot(source if steps_in(source) else inner, step=step)
