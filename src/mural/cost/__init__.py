"""What a model costs: time and memory of its calls, blocks and stages, measured on the device at hand or predicted.

hardware.py         what a device and its links can do: known machines, and links measured; rates.py measures the device
clock.py            seconds and peak bytes of a piece of work; trial.py: of a layer or a block, forward and backward
measured_blocks.py  blocks of a graph, each kind once; replay.py runs calls again; cache.py keeps what was measured
call_features.py    what a call does, from the graph's table of facts; roofline.py: what its time is made of
fitted_model.py     the fitted model of a device and its trees, plain data (benchmarks/cost fits them)
memory_effects.py   what each call does to memory, counted by memory_tally.py
memory_walk.py      the peak of a walk over these effects, with the books of ledger.py
stage_memory.py     what each possible stage of a graph needs, for cuts by memory
predict.py          times of a graph's calls; estimate.py: times and peaks, computed once
"""

from mural.cost.cache import Cache, cache_folder
from mural.cost.estimate import Estimate, Seconds, estimate, peak, seconds
from mural.cost.fitted_model import Model, load
from mural.cost.hardware import Hardware, Link, measure_link
from mural.cost.measured_blocks import MeasuredBlock, block, blocks, measure
from mural.cost.memory_walk import Peak
from mural.cost.rates import Rates
from mural.cost.trial import Timing

__all__ = [
    "Cache",
    "Estimate",
    "Hardware",
    "Link",
    "MeasuredBlock",
    "Model",
    "Peak",
    "Rates",
    "Seconds",
    "Timing",
    "block",
    "blocks",
    "cache_folder",
    "estimate",
    "load",
    "measure",
    "measure_link",
    "peak",
    "seconds",
]
