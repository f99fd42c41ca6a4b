"""The state of a training as named tensors and JSON values, under the names of the unsplit model; and back, in place.

model.conv.weight                     parameters and persistent buffers, tied ones once
model.loss.temperature                those of the loss, in a training's checkpoint
optimizer.state.conv.weight.exp_avg   the optimizer's state, by the name of the parameter
optimizer.groups.0.lr                 options of a group that are tensors; the others are values
scheduler.…, scaler.…                 theirs

What a rank has on the meta device is held by others: it is neither saved nor restored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mural.channel.share import share_of
from mural.checkpoint.optimizer_state import Loaded, decode_optimizer, encode_optimizer, united, without
from mural.checkpoint.pieces import Piece
from mural.checkpoint.snapshot import Snapshot, lacking, listed, on_all
from mural.checkpoint.values import decode, encode
from mural.comm.failure.agree import gather
from mural.errors import CheckpointError
from mural.ranks import Mesh


class Stateful(Protocol):
    """A schedule of learning rates, or a scaler of gradients."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class State:
    """What `Checkpoints.save` takes: the tensors are those of the training itself, not copies.

    Of parameters that are split by channels, each rank has a piece.
    """

    tensors: dict[str, Tensor | Piece]
    values: dict[str, Any]


def state_of(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    mesh: Mesh | None = None,
) -> State:
    """The state of a training as it is now; where the ranks of a mesh hold parts of the model, collective."""
    model = plain(model)
    tensors, values = _model_state(model)
    if optimizer is not None:
        own = encode_optimizer(optimizer, _names(model), tensors)
        parts = [own] if mesh is None else list(gather(mesh, own, "the state of optimizers").values())
        values["optimizer"] = united(parts, [clean(name) for name, _ in model.named_parameters()])
    for name, part in _parts(scheduler, scaler).items():
        found: dict[str, Tensor] = {}
        values[name] = encode(part.state_dict(), name, found)
        tensors.update(found)
    return State(tensors, values)


def restore(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
) -> None:
    """Set a training to a snapshot, in place; collective. Nothing is changed unless everything fits on every rank.

    What is not given (an optimizer, for inference) is left in the snapshot.
    """
    model = plain(model)
    parts = _parts(scheduler, scaler)
    with on_all(snapshot.group):
        plan = _plan(snapshot, model, optimizer, parts)
    snapshot.load(plan.targets)
    modules = {clean(name): module for name, module in model.named_modules()}
    for name, value in plan.extra.items():
        modules[name].set_extra_state(value)
    if optimizer is not None and plan.optimizer is not None:
        plan.optimizer.apply(optimizer)
    for name, part in parts.items():
        part.load_state_dict(plan.parts[name])


def plain(model: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel` and `torch.compile`."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@dataclass(frozen=True)
class _Plan:
    targets: dict[str, Tensor | Piece]
    extra: dict[str, Any]
    optimizer: Loaded | None
    parts: dict[str, dict[str, Any]]


def _plan(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer | None, parts: Mapping[str, Stateful]) -> _Plan:
    try:
        targets, extra = _model_targets(snapshot, model)
        asked = [
            name for name in (*parts, *(["optimizer"] if optimizer is not None else [])) if name not in snapshot.values
        ]
        if asked:
            raise CheckpointError(f"it was saved without {' and '.join(asked)}")
        loaded = None
        if optimizer is not None:
            packed = snapshot.values["optimizer"]
            elsewhere = {clean(name) for name, parameter in model.named_parameters() if parameter.is_meta}
            here = without(packed, elsewhere)
            loaded = decode_optimizer(here, optimizer, _names(model), snapshot.tensors, targets)

        fill = partial(_filled, snapshot, targets)
        return _Plan(targets, extra, loaded, {name: decode(snapshot.values[name], fill) for name in parts})
    except CheckpointError as error:
        raise CheckpointError(f"{snapshot.place} does not fit: {error}") from error


def _parts(scheduler: Stateful | None, scaler: Stateful | None) -> dict[str, Stateful]:
    given = {"scheduler": scheduler, "scaler": scaler}
    return {name: part for name, part in given.items() if part is not None}


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): clean(name) for name, parameter in model.named_parameters()}


def clean(name: str) -> str:
    """The name without what `torch.compile` of a submodule puts into it."""
    return name.replace("._orig_mod", "")


def _filled(snapshot: Snapshot, targets: dict[str, Tensor | Piece], name: str) -> Tensor:
    """A new tensor that the snapshot's of that name will be loaded into."""
    entry, known = snapshot.tensors[name], targets.get(name)
    target = known if isinstance(known, Tensor) else torch.empty(entry.shape, dtype=entry.dtype)
    targets[name] = target
    return target


def _placed(tensor: Tensor) -> Tensor | Piece:
    """A tensor of the model without its history; a share as the piece that it is of the whole parameter."""
    share = share_of(tensor)
    return tensor.detach() if share is None else Piece(tensor.detach(), share.shape, share.box)


def _model_state(model: nn.Module, meta: bool = False) -> tuple[dict[str, Tensor | Piece], dict[str, Any]]:
    own = {id(t): t for t in (*model.parameters(), *model.buffers())}
    tensors: dict[str, Tensor | Piece] = {}
    inside: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    extra: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = clean(key)
        if key.endswith("_extra_state"):
            extra[name.removesuffix("_extra_state").removesuffix(".")] = encode(value, f"model.{name}", inside)
        elif not isinstance(value, Tensor) or id(value) not in own:
            raise CheckpointError(
                f"state_dict() of the model has {name}, which is neither a parameter nor a buffer: it could be saved, "
                f"but not restored"
            )
        elif nn.parameter.is_lazy(value):
            raise CheckpointError(f"{name} is not initialized yet: run the model once before it is saved or restored")
        elif id(value) in first:
            ties[name] = first[id(value)]
        else:
            first[id(value)] = name
            if meta or not value.is_meta:
                tensors[f"model.{name}"] = _placed(value)
    return {**tensors, **inside}, {"model": {"ties": ties, "extra": extra}}


def _model_targets(snapshot: Snapshot, model: nn.Module) -> tuple[dict[str, Tensor | Piece], dict[str, Any]]:
    found, values = _model_state(model, meta=True)
    here, there = values["model"], snapshot.values.get("model")
    if there is None:
        raise CheckpointError("it holds no model")
    targets = {name: tensor for name, tensor in found.items() if not _is_extra(name)}
    saved = {name for name in snapshot.tensors if name.startswith("model.") and not _is_extra(name)}
    terms = {f"model.{name}" for name in there.get("loss", ())}
    if not terms & targets.keys():  # the model alone, as for inference: what belongs to the loss is left out
        saved -= terms
    faults = [lacking(name, saved) for name in targets if name not in saved]
    faults += [lacking(name, targets, "here") for name in sorted(saved) if name not in targets]
    for name, tensor in targets.items():
        entry = snapshot.tensors.get(name)
        if entry is not None and entry.shape != tuple(tensor.shape):
            faults.append(f"{name} has the shape {entry.shape} there, but {tuple(tensor.shape)} here")
    if here["ties"] != there["ties"]:
        faults.append(f"the tied parameters are {there['ties'] or 'none'} there, but {here['ties'] or 'none'} here")
    if here["extra"].keys() != there["extra"].keys():
        faults.append(f"modules with extra state are {[*there['extra']]} there, but {[*here['extra']]} here")
    if faults:
        raise CheckpointError(f"it is of another model: {listed(faults)}")

    targets = {name: target for name, target in targets.items() if isinstance(target, Piece) or not target.is_meta}
    fill = partial(_filled, snapshot, targets)
    return targets, {path: decode(value, fill) for path, value in there["extra"].items()}


def _is_extra(name: str) -> bool:
    return "_extra_state" in name.split(".")
