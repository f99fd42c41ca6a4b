"""Settings of every test: hypothesis draws fixed cases or fresh ones, torch leaves a core to others; a browser."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from chromium import Browser, chromium

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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium: run python tests/get_chromium.py, or let $CHROMIUM name one")
    with Browser(program) as running:
        yield running
