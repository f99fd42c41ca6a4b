"""Data parallelism: gradients, weights and buffers of replicated parameters, averaged over ranks."""

from mural.gradients.average import average_buffers, average_weights
from mural.gradients.buckets import is_reduced
from mural.gradients.reducer import Reducer, reduce_gradients

__all__ = ["Reducer", "average_buffers", "average_weights", "is_reduced", "reduce_gradients"]
