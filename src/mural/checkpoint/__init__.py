"""Checkpoints: the state of a training on disk, without pickle, complete or absent, for any plan."""

from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.export import export
from mural.checkpoint.pieces import Piece
from mural.checkpoint.snapshot import Snapshot, open_snapshot
from mural.checkpoint.state import State, restore, state_of

__all__ = ["Checkpoints", "Piece", "Snapshot", "State", "export", "open_snapshot", "restore", "state_of"]
