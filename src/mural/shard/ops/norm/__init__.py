"""Norms: statistics of the whole image or of each piece, layer norm, and vectors of one length."""

from mural.shard.ops.norm import layer_norm, whole_image

__all__ = ["layer_norm", "whole_image"]
