"""mural trains vision models on images too large for one device, exactly as one device would."""

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


def __getattr__(name: str) -> Any:
    """`Trainer` and `predict`, when first asked for: their checkpoints import what most programs do not need."""
    if name == "predict":
        from mural.prediction import predict  # noqa: PLC0415

        return predict
    if name == "Trainer":
        from mural.train import Trainer  # noqa: PLC0415

        return Trainer
    raise AttributeError(f"module 'mural' has no attribute {name!r}")
