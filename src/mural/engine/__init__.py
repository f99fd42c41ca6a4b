"""The engine under `parallelize`: what a plan makes of a model, its inputs and its weights."""

from mural.engine.extra_state import share_from_first
from mural.engine.held_model import Loss
from mural.engine.materialize import materialize
from mural.engine.parallel import Parallel

__all__ = ["Loss", "Parallel", "materialize", "share_from_first"]
