"""Shares in checkpoints: what a rank holds of a split parameter, and of an optimizer's state for it, as pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mural.channel.share import share_of
from mural.checkpoint.manifest import Entry
from mural.checkpoint.pieces import Piece
from mural.errors import CheckpointError


def placed(tensor: Tensor) -> Tensor | Piece:
    """A tensor of the model without its history; a share as the piece that it is of the whole parameter."""
    share = share_of(tensor)
    return tensor.detach() if share is None else Piece(tensor.detach(), share.shape, share.box)


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


def room(entry: Entry, parameter: Tensor, have: Any, device: torch.device) -> Tensor | Piece:
    """What takes a saved tensor of a parameter's state: the tensor that is there already if it fits, or a new one."""
    share = share_of(parameter)
    if share is None or entry.shape != share.shape:
        return fitting(entry, entry.shape, have, device)
    return Piece(fitting(entry, tuple(parameter.shape), have, device), share.shape, share.box)


def fitting(entry: Entry, shape: tuple[int, ...], have: Any, device: torch.device) -> Tensor:
    """The tensor that is there already, if it can take what is saved, or a new one."""
    fits = isinstance(have, Tensor) and (tuple(have.shape), have.dtype) == (shape, entry.dtype)
    return have if fits else torch.empty(shape, dtype=entry.dtype, device=device)
