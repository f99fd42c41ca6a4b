"""The engine under `parallelize`: what a plan makes of a model, its inputs and its weights."""

from mural.engine.broadcast_values import share_from_first
from mural.engine.materialize import materialize
from mural.engine.parallel import Loss, Parallel
from mural.engine.pipelined import Pipelined

__all__ = ["Loss", "Parallel", "Pipelined", "materialize", "share_from_first"]
