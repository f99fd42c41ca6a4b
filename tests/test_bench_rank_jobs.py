"""The benchmarks' jobs: choosing them by name, and running several at a time on a number of cores."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import rank_jobs
from harness.results import Log
from harness.selection import listing, matching


def test_names_are_chosen_by_patterns_and_a_pattern_without_a_match_is_an_error() -> None:
    names = ["unet/8/layer", "unet/4/layer", "vgg/8/block"]
    assert matching(names, []) == names
    assert matching(names, ["vgg/*", "unet/4/*", "*/layer"]) == ["vgg/8/block", "unet/4/layer", "unet/8/layer"]
    with pytest.raises(SystemExit, match=r"nothing is called 'unet/2/\*': --list prints the 3 names"):
        matching(names, ["unet/2/*"])
    assert listing({"a": 90.0, "b": 30.0}).splitlines()[-1].strip() == "120 s  all 2 together: 2.0 minutes"


@dataclass(frozen=True)
class Sleeping:
    name: str
    ranks: int

    @property
    def about(self) -> dict[str, Any]:
        return {"kind": "sleeping", "name": self.name}


def test_jobs_run_side_by_side_while_each_rank_has_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy, most, lock = [0], [0], threading.Lock()

    def pretended(_: Any, ranks: int, job: Any, **__: Any) -> dict[str, Any]:
        with lock:
            busy[0] += ranks
            most[0] = max(most[0], busy[0])
        time.sleep(0.05)
        with lock:
            busy[0] -= ranks
        if job.name == "bad":
            raise OSError("no room")
        return {"seconds": 0.05}

    monkeypatch.setattr(rank_jobs, "run_local", pretended)
    log = Log("some", tmp_path / "found.jsonl", [], minutes=1)
    jobs = [Sleeping("a", 2), Sleeping("bad", 2), Sleeping("b", 3), Sleeping("c", 1), Sleeping("large", 9)]
    rank_jobs.side_by_side(log, jobs, cores=4, line=lambda record: record["name"])
    assert {r["name"] for r in log.records if r["kind"] == "sleeping"} == {"a", "b", "c", "large"}
    assert [r["error"] for r in log.records if r["kind"] == "failure"] == ["no room"]
    assert most[0] == 9, "more ranks than cores run alone; the others share"
    late = Log("some", tmp_path / "late.jsonl", [], minutes=0)
    rank_jobs.side_by_side(late, jobs, cores=4)
    assert not [r for r in late.records if r["kind"] == "sleeping"]
