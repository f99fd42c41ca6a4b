"""Norms: statistics of the whole image or of each piece, layer norm, and unit vectors."""

from mural.shard.ops.norm import layer_norm, whole_image

__all__ = ["layer_norm", "whole_image"]
