"""Collectives as lists of rounds, to run, simulate and price; users call them as `mural.comm.all_reduce` and so on."""

from mural.collectives.calls import all_gather, all_reduce, broadcast, explain, reduce, reduce_scatter

__all__ = ["all_gather", "all_reduce", "broadcast", "explain", "reduce", "reduce_scatter"]
