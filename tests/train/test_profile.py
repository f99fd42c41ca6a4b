"""`mural profile` on real runs: every rank is there, its waits have names, and the run is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import run_config, write_images

from mural.profile import Profile, chrome_trace
from mural.profile.profiled_steps import profile_rank
from ranks import run_on


def profiled(config: Any) -> Profile | None:
    return profile_rank(0, config, steps=2, warmup=1)


PLANS: list[Any] = [
    ({"spatial": [2, 1]}, {"convolution", "gradients", "agreement"}),
    pytest.param({"data": 2}, {"gradients", "agreement"}, marks=pytest.mark.slow),
    ({"stage": 2}, {"stages", "loss", "norm"}),
]


@pytest.mark.parametrize(("plan", "kinds"), PLANS, ids=str)
def test_every_rank_and_kind_of_wait_is_there(tmp_path: Path, plan: dict[str, Any], kinds: set[str]) -> None:
    write_images(tmp_path)
    config = run_config(tmp_path, plan=plan, train__steps=3)
    found, nothing = run_on(2, profiled, config)
    assert nothing is None
    assert [(s.rank, s.step) for s in found.shares] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert kinds <= set(found.kinds)
    for shares in found.shares:
        assert shares.compute > 0
        assert shares.idle >= 0
        assert shares.idle + shares.communicating + shares.data < shares.seconds
    # Without a clock of their own, all posts that a wait needs are known.
    posts = {(note.rank, post) for note in found.notes for post in note.trace.posts}
    needs = {need for note in found.notes for wait in note.trace.waits for need in wait.needs}
    assert needs
    assert needs <= posts
    assert len(json.loads(chrome_trace(found.notes))["traceEvents"]) > 20
