"""Operations on one position at a time, or along a dim that is not cut."""

from mural.shard.ops.pointwise import along_dim, elementwise, embedding

__all__ = ["along_dim", "elementwise", "embedding"]
