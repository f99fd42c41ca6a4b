"""Layers split by channels: each rank of the channel axis holds a share of their parameters."""
