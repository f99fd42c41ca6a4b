"""Sharded tensors: a global tensor cut over a mesh, on which every operation is exact or refused."""

from mural.shard import ops
from mural.shard.functions import watch_functions
from mural.shard.layout import Layout
from mural.shard.ops.norm.rank_statistics import batchnorm_scope
from mural.shard.ops.reduce.losses import dice_loss
from mural.shard.place import shard
from mural.shard.rules import Windowed, tile
from mural.shard.scripted import watch_compiled
from mural.shard.table import KINDS, TABLE
from mural.shard.tensor import ShardedTensor

watch_compiled()
watch_functions()

__all__ = [
    "KINDS",
    "TABLE",
    "Layout",
    "ShardedTensor",
    "Windowed",
    "batchnorm_scope",
    "dice_loss",
    "ops",
    "shard",
    "tile",
]
