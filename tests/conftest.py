"""Settings of every test: hypothesis draws fixed cases or fresh ones, and torch leaves the other core to others."""

import os

import torch
from hypothesis import HealthCheck, settings

# A loaded machine is slow without anything being wrong, so no test fails for the time that it takes.
COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("fixed", derandomize=True, database=None, max_examples=60, **COMMON)
settings.register_profile("fresh", max_examples=200, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

torch.set_num_threads(1)
