"""An optimizer's state by the names of parameters, so that it fits the same model under any plan."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mural.channel.share import share_of
from mural.checkpoint.manifest import StoredTensor
from mural.checkpoint.pieces import Piece
from mural.checkpoint.snapshot import lacking, listed
from mural.checkpoint.values import decode, encode
from mural.errors import CheckpointError


def encode_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], tensors: dict[str, Tensor | Piece]
) -> dict[str, Any]:
    """The optimizer as JSON, its tensors put into `tensors`; `names` gives a parameter's name by its identity."""
    state: dict[str, Any] = {}
    host: list[str] = []
    for parameter, own in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            raise CheckpointError(f"optimizer.state has an entry for {_what(parameter)}, {_FOREIGN}")
        found: dict[str, Tensor] = {}
        state[name] = encode(dict(own), f"optimizer.state.{name}", found)
        host += [key for key, tensor in found.items() if tensor.is_cpu and not parameter.is_cpu]
        tensors.update({key: placed_state(key, tensor, parameter) for key, tensor in found.items()})
    groups: list[dict[str, Any]] = []
    for i, group in enumerate(optimizer.param_groups):
        found = {}
        options = {k: encode(v, f"optimizer.groups.{i}.{k}", found) for k, v in group.items() if k not in _PARAMETERS}
        tensors.update(found)
        groups.append({"params": _names_of(i, group, names), "options": options})
    on_host = all(parameter.is_cpu for parameter in optimizer.state)
    return {
        "type": type(optimizer).__name__,
        "state": state,
        "groups": groups,
        "host": None if on_host else host,  # what was in host memory while its parameter was not
    }


def united(parts: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """The optimizers of ranks that hold different parameters as that of the whole model; `order` is the model's."""
    if len(parts) == 1:
        return dict(parts[0])
    place = {name: i for i, name in enumerate(order)}

    def in_order(names: Iterable[str]) -> list[str]:
        return sorted(set(names), key=lambda name: place[name])

    states = {name: own for part in parts for name, own in part["state"].items()}
    groups = [
        {**group, "params": in_order(name for part in parts for name in part["groups"][i]["params"])}
        for i, group in enumerate(parts[0]["groups"])
    ]
    hosts = [part["host"] for part in parts]
    host = None if all(h is None for h in hosts) else sorted({name for h in hosts for name in h or ()})
    return {**parts[0], "state": {n: states[n] for n in in_order(states)}, "groups": groups, "host": host}


def without(packed: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """The optimizer without the parameters that other ranks hold."""
    groups = [{**group, "params": [n for n in group["params"] if n not in names]} for group in packed["groups"]]
    return {**packed, "state": {n: own for n, own in packed["state"].items() if n not in names}, "groups": groups}


@dataclass(frozen=True)
class Loaded:
    """What an optimizer will be set to, once its tensors are filled."""

    state: dict[Tensor, dict[str, Any]]
    options: list[dict[str, Any]]

    def apply(self, optimizer: Optimizer) -> None:
        """Set it."""
        optimizer.state.clear()
        for parameter, own in self.state.items():
            optimizer.state[parameter] = own
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)


def decode_optimizer(
    packed: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[int, str],
    entries: Mapping[str, StoredTensor],
    targets: dict[str, Tensor | Piece],
) -> Loaded:
    """What the optimizer will be set to; the tensors of it that are to be filled go into `targets`, by name."""
    _check(packed, optimizer, names)
    host = None if packed["host"] is None else frozenset(packed["host"])
    groups: dict[str, dict[str, Any]] = {}
    parameters: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            groups[names[id(parameter)]], parameters[names[id(parameter)]] = group, parameter
    state: dict[Tensor, dict[str, Any]] = {}
    for name, own in packed["state"].items():
        parameter, prefix = parameters[name], f"optimizer.state.{name}."
        have = dict(optimizer.state.get(parameter, {}))

        def fill(tensor: str, name: str = name, prefix: str = prefix, have: dict[str, Any] = have) -> Tensor:
            key = tensor.removeprefix(prefix)
            on_host = key == "step" if host is None else tensor in host
            device = _device(on_host, groups[name], parameters[name])
            target = targets.setdefault(tensor, room(entries[tensor], parameters[name], have.get(key), device))
            return target.tensor if isinstance(target, Piece) else target

        state[parameter] = decode(own, fill)
    options: list[dict[str, Any]] = []
    for i, (saved, group) in enumerate(zip(packed["groups"], optimizer.param_groups, strict=True)):

        def option(tensor: str, prefix: str = f"optimizer.groups.{i}.", group: dict[str, Any] = group) -> Tensor:
            have = group.get(tensor.removeprefix(prefix))
            device = have.device if isinstance(have, Tensor) else torch.device("cpu")
            known = targets.get(tensor)
            target = (
                known if isinstance(known, Tensor) else fitting(entries[tensor], entries[tensor].shape, have, device)
            )
            targets[tensor] = target
            return target

        options.append(decode({k: v for k, v in saved["options"].items() if k not in _HOW}, option))
    return Loaded(state, options)


def placed_state(name: str, state: Tensor, parameter: Tensor) -> Tensor | Piece:
    """A tensor of an optimizer's state: one of a share's shape is cut as the share is, a number is one for all."""
    share = share_of(parameter)
    if share is None or (state.numel() == 1 and state.shape != parameter.shape):
        return state
    if state.shape != parameter.shape:
        raise CheckpointError(
            f"{name} has the shape {tuple(state.shape)} for a share of shape {tuple(parameter.shape)} of {share.name}: "
            f"a checkpoint holds the state of split parameters value by value; use another optimizer, or channel = 1"
        )
    return Piece(state, share.shape, share.box)


def room(entry: StoredTensor, parameter: Tensor, have: Any, device: torch.device) -> Tensor | Piece:
    """What takes a saved tensor of a parameter's state: the tensor that is there already if it fits, or a new one."""
    share = share_of(parameter)
    if share is None or entry.shape != share.shape:
        return fitting(entry, entry.shape, have, device)
    return Piece(fitting(entry, tuple(parameter.shape), have, device), share.shape, share.box)


def fitting(entry: StoredTensor, shape: tuple[int, ...], have: Any, device: torch.device) -> Tensor:
    """The tensor that is there already, if it can take what is saved, or a new one."""
    fits = isinstance(have, Tensor) and (tuple(have.shape), have.dtype) == (shape, entry.dtype)
    return have if fits else torch.empty(shape, dtype=entry.dtype, device=device)


_PARAMETERS = ("params", "param_names")
_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how the optimizer works, not what it computes: they stay as they are here."""
_FOREIGN = "which is not a parameter of the model: build the optimizer from the parameters of the model that is saved"


def _names_of(index: int, group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    for parameter in group["params"]:
        if id(parameter) not in names:
            raise CheckpointError(f"group {index} of the optimizer has {_what(parameter)}, {_FOREIGN}")
    return [names[id(parameter)] for parameter in group["params"]]


def _check(packed: Mapping[str, Any], optimizer: Optimizer, names: Mapping[int, str]) -> None:
    kind = type(optimizer).__name__
    if kind != packed["type"]:
        saved = packed["type"]
        raise CheckpointError(f"it holds the state of {saved}, but the optimizer here is {kind}: use {saved}")
    if len(packed["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"it has {len(packed['groups'])} groups of parameters, the optimizer here {len(optimizer.param_groups)}"
        )
    faults: list[str] = []
    for i, (saved, group) in enumerate(zip(packed["groups"], optimizer.param_groups, strict=True)):
        own = _names_of(i, group, names)
        there = saved["params"]
        faults += [f"group {i}: {lacking(name, there)}" for name in own if name not in there]
        faults += [f"group {i}: {lacking(name, own, 'here')}" for name in there if name not in own]
    if faults:
        raise CheckpointError(f"the optimizer's groups differ: {listed(faults)}")


def _device(on_host: bool, group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where a state lives: next to its parameter, but in host memory if it was there, unless kernels need it."""
    needed = group.get("capturable") or group.get("fused")
    return torch.device("cpu") if on_host and not needed else parameter.device


def _what(parameter: Any) -> str:
    return f"a tensor of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter)
