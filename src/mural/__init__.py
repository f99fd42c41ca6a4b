"""mural trains vision models on images too large for one device, exactly as one device would."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mural import comm
from mural.check import check
from mural.data import open
from mural.errors import LayoutError as LayoutError
from mural.errors import MuralError
from mural.errors import PeerError as PeerError
from mural.errors import PlanError as PlanError
from mural.errors import UnsupportedOp as UnsupportedOp
from mural.geometry import Cuts
from mural.gradients import reduce_gradients
from mural.model_graph import capture
from mural.parallelize import parallelize
from mural.planner import plan
from mural.plans import Plan
from mural.ranks import Mesh as Mesh
from mural.ranks import init
from mural.shard import ShardedTensor, dice_loss, shard

if TYPE_CHECKING:
    from mural.prediction import predict
    from mural.train import Trainer

__all__ = [
    "Cuts",
    "MuralError",
    "Plan",
    "ShardedTensor",
    "Trainer",
    "capture",
    "check",
    "comm",
    "dice_loss",
    "init",
    "open",
    "parallelize",
    "plan",
    "predict",
    "reduce_gradients",
    "shard",
]


LATER = {"Trainer": "mural.train", "predict": "mural.prediction"}
"""Names whose modules import what most programs do not need."""


def __getattr__(name: str) -> Any:
    """`Trainer`, `predict`, and parts of the package such as `mural.models`, when they are first asked for."""
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    if not name.startswith("_") and find_spec(f"mural.{name}") is not None:
        return import_module(f"mural.{name}")
    raise AttributeError(f"module 'mural' has no attribute {name!r}")
