"""What a model costs: time and memory of its calls, blocks and stages, measured on the device at hand or predicted.

hardware.py   what a device and its links can do, known machines; rates.py measures the device, links.py messages
clock.py      seconds and peak bytes of a piece of work; trial.py of a layer or a step; host.py what the host spends
measure.py    blocks of a graph, each kind once; replay.py runs calls again; cache.py is what was measured before
families.py   operations whose kernels are alike; work.py what a call does; roofline.py what its time is made of
model.py      the fitted model of a device, plain data; trees.py its trees
layers.py     single layers as data; sweep.py of random sizes; fit.py from them to a model; refit.py on this machine
effects.py    what each call does to memory, counted by tally.py; memory.py walks over them, with ledger.py's books
predict.py    times of a graph's calls; estimate.py times and peaks, worked out once
"""

from mural.cost.cache import Cache, cache_folder
from mural.cost.estimate import Estimate, Seconds, estimate, peak, seconds
from mural.cost.hardware import Hardware
from mural.cost.links import Link, measure_link
from mural.cost.measure import Block, block, blocks, measure
from mural.cost.memory import Peak
from mural.cost.model import Model, load
from mural.cost.rates import Rates
from mural.cost.refit import fit_here
from mural.cost.trial import Timing

__all__ = [
    "Block",
    "Cache",
    "Estimate",
    "Hardware",
    "Link",
    "Model",
    "Peak",
    "Rates",
    "Seconds",
    "Timing",
    "block",
    "blocks",
    "cache_folder",
    "estimate",
    "fit_here",
    "load",
    "measure",
    "measure_link",
    "peak",
    "seconds",
]
