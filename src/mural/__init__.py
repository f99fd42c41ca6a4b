"""mural trains vision models on images too large for one device, exactly as one device would."""

from mural import comm
from mural.comm import Mesh, init
from mural.errors import LayoutError, MuralError, PeerError, PlanError, UnsupportedOp
from mural.geometry import Cuts
from mural.graph import capture
from mural.replicate import reduce_gradients
from mural.shard import ShardedTensor, dice_loss, shard

__all__ = [
    "Cuts",
    "LayoutError",
    "Mesh",
    "MuralError",
    "PeerError",
    "PlanError",
    "ShardedTensor",
    "UnsupportedOp",
    "capture",
    "comm",
    "dice_loss",
    "init",
    "reduce_gradients",
    "shard",
]
