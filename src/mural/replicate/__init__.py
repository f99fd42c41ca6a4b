"""Data parallelism: gradients, weights and buffers of replicated parameters, averaged over ranks."""

from mural.replicate.average import average_buffers, average_weights
from mural.replicate.gradients import is_reduced, reduce_gradients
from mural.replicate.master import Master
from mural.replicate.reducer import Reducer

__all__ = ["Master", "Reducer", "average_buffers", "average_weights", "is_reduced", "reduce_gradients"]
