"""Settings of every test: hypothesis draws fixed cases or fresh ones, and torch leaves the other core to others."""

import gc
import os

import torch
from hypothesis import HealthCheck, Phase, settings

# A loaded machine is slow without anything being wrong, so no test fails for the time that it takes.
COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("fixed", derandomize=True, database=None, max_examples=30, **COMMON)
# Each failing case ends the ranks, so a search for the smallest one would take an hour: the blob brings it back.
FOUND = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("fresh", max_examples=200, phases=FOUND, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

torch.set_num_threads(1)
gc.set_threshold(100_000, 50, 100)  # thousands of collected tests are there for good: looking at them takes a minute

collect_ignore = ["gpu"]  # what make test-gpu runs; test_gpu_families.py tries it on the CPU
