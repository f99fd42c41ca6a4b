"""Kills on a fixed selection: each run ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from hunt.kills import PLANS, Broken, Ground, check_error, killed_run
from mural.train import Config


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground.of(tmp_path_factory.mktemp("kills"))


def test_plans_are_those_of_runs(tmp_path: Path) -> None:
    for plan in PLANS:
        config = Ground(tmp_path, {}).config(plan, "run", restarts=2)
        assert isinstance(config, Config)
        config.plan.check_runnable()


def test_an_error_without_the_signal_is_not_clear() -> None:
    check_error(1, [], "rank 1 (pid 7) was ended by SIGKILL, as the system does when memory runs out")
    for log in ("", "rank 1 was ended by SIGKILL\nTraceback (most recent call last):"):
        with pytest.raises(Broken, match="without a clear error"):
            check_error(1, [], log)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_killed_runs_end_with_the_same_bits(ground: Ground, plan: str) -> None:
    seed = None if os.environ.get("HYPOTHESIS_PROFILE") == "fresh" else plan
    assert killed_run(Random(seed), ground, plan, f"hurt {plan}", kills=2)
