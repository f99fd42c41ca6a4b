"""The planner: which plan runs a model on the hardware at hand, found out before anything runs."""

from mural.planner.one_device import plan as plan
