"""The benchmark of the planner's choice: its names, the plans of its mixes, a part in one process, and its tables."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from choice import page
from choice.parts import (
    AGAIN,
    ALONE,
    BATCHES,
    CHOSEN,
    FIXED,
    HOST,
    LEAN,
    MIXES,
    MORE,
    PLACES,
    TOY,
    USUAL,
    Part,
    Sizes,
    all_parts,
    expected,
    not_run,
    selected,
)
from choice.predictions import predicted
from choice.rank import DROPPED, Chooser

from mural.engine.offloaded_updates import TENSORS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GIB = 2**30


@pytest.mark.parametrize("sizes", [Sizes(), TOY])
def test_names_lead_back_to_their_parts(sizes: Sizes) -> None:
    parts = all_parts(sizes)
    assert [Part.parse(part.name) for part in parts] == parts
    assert len({part.name for part in parts}) == len(parts) == len(sizes.images) * len(sizes.caps) * len(MIXES)
    for wrong in ("unet/2048/8", "vgg/2048/8/keep", "unet/2048/8/again10", "unet/0/8/keep"):
        with pytest.raises(ValueError, match="is not the name of a part"):
            selected(parts, [wrong])


def test_the_fixed_set_has_twelve_mixes_and_more() -> None:
    assert len(FIXED) >= 12
    assert set(MIXES) - set(FIXED) == {CHOSEN}
    assert {part.model for part in all_parts(Sizes())} == set(BATCHES) == set(page.TITLES)


def foreseen(peak: float, seconds: float = 0.1, **more: Any) -> dict[str, Any]:
    plan = {"memory": "8GiB", "recompute": [], "offload": [], "stream": None}
    mix = {"plan": plan, "peak": int(peak * GIB), "seconds": seconds, "moved": 0, "words": "some", "same_as": None}
    return mix | {"again": plan["recompute"], "tiles": []} | more


def prediction(**mixes: dict[str, Any]) -> dict[str, Any]:
    others = {mix: {"impossible": "no tile fits"} for mix in MIXES}
    return {"kind": "predicted", "name": "unet/2048/8", "limit": 8 * GIB, "mixes": others | mixes}


def test_what_need_not_run() -> None:
    found = prediction(keep=foreseen(8.7), all=foreseen(8.9), again25=foreseen(1, same_as="keep"))
    reasons = {mix: not_run(Part("unet", 2048, 8, mix), found) for mix in ("keep", "all", "again25", "tile1")}
    assert reasons == {
        "keep": None, "all": "predicted too large", "again25": "the same as keep", "tile1": "impossible: no tile fits"
    }  # fmt: skip
    assert expected(Part("unet", 2048, 8, "all"), found) == 0 < expected(Part("unet", 2048, 8, "keep"), found)


def test_more_mixes_run_where_fewer_than_twelve_of_the_usual_ones_do() -> None:
    few = prediction(**dict.fromkeys((*USUAL[:11], "flat2"), foreseen(4)))
    enough = prediction(**dict.fromkeys((*USUAL[:12], "flat2"), foreseen(4)))
    part = Part("unet", 2048, 8, "flat2")
    assert (not_run(part, few), not_run(part, enough)) == (None, "enough others run")


@pytest.mark.slow
@pytest.mark.parametrize("part", all_parts(TOY)[:: len(MIXES)], ids=lambda part: part.setting)
def test_under_a_toys_cap_mixes_do_what_they_are_named_after(part: Part) -> None:
    """A toy's cap once had room for everything: mixes with offload sent nothing, and tiles were too slow to run."""
    found = predicted(part, toy=True)
    mixes, room = found["mixes"], found["room"]
    assert all(mixes[name]["peak"] > room for name in ALONE)
    offloaded = [mixes[name] for name in (*(name + HOST for name in AGAIN), LEAN)]
    assert all(mix["moved"] > 0 and mix["peak"] <= room for mix in offloaded)
    assert len({len(mix["plan"]["recompute"]) for mix in offloaded}) > 4
    run = {name for name in MIXES if not_run(replace(part, mix=name), found) is None}
    assert {"chosen", "again100", "keep+host", "again100+host"} <= run
    # A Swin transformer in the smallest tiles takes more than if everything is kept.
    assert ("tile1" in run) == (part.model != "swin_t")


@pytest.fixture(scope="module")
def toy_plans() -> dict[str, dict[str, Any]]:
    """The plans of a small U-Net's mixes, as they come out of a file."""
    found = json.loads(json.dumps(predicted(Part.parse("unet/128/8/chosen"), toy=True)))
    assert found["mixes"]["chosen"]["explained"]
    return {mix: about["plan"] for mix, about in found["mixes"].items() if "plan" in about}


def run_toy(mix: str, plan: dict[str, Any]) -> dict[str, Any]:
    return Chooser().run_part(f"unet/128/8/{mix}", plan, toy=True, repeats=1, budget=0.0)


@pytest.mark.slow
def test_mixes_become_plans(toy_plans: dict[str, dict[str, Any]]) -> None:
    assert toy_plans["keep"]["recompute"] == [] != toy_plans["again50+host"]["recompute"]
    assert toy_plans["again50+host"]["offload"] == ["activations"]
    assert toy_plans["all"]["recompute"] == "all"
    assert toy_plans["tile1"]["stream"] == [64, 64]
    assert toy_plans["flat2"]["stream"] == [64, 128]
    halves = [set(toy_plans[place + HOST]["recompute"]) for place in PLACES]
    assert halves[0] | halves[1] == set(toy_plans["again100+host"]["recompute"]) > halves[2]
    assert not halves[0] & halves[1]


@pytest.mark.slow
def test_blocks_computed_again_with_offload_run_as_those_that_are_kept(toy_plans: dict[str, dict[str, Any]]) -> None:
    """Without a cap everything leaves; under a wide one nothing; in between, no more than has to."""
    name, plan = "again100+host", toy_plans["again100+host"]
    kept = run_toy("keep", toy_plans["keep"])
    free, wide = (run_toy(name, plan | {"memory": memory}) for memory in ("", "1GiB"))
    room = (free["report"]["peak"] + wide["report"]["peak"]) // 2
    tight = run_toy(name, plan | {"memory": str(math.ceil((room + 1) / TENSORS))})
    assert kept["losses"] == free["losses"] == wide["losses"] == tight["losses"]
    assert len(kept["losses"]) > DROPPED
    assert free["report"]["peak"] <= tight["report"]["peak"] <= room + 1 < wide["report"]["peak"]
    assert free["report"]["to_host"] >= tight["report"]["to_host"] > wide["report"]["to_host"] == 0


@pytest.mark.slow
def test_streamed_mixes_run_as_those_that_are_kept(toy_plans: dict[str, dict[str, Any]]) -> None:
    kept, streamed = (run_toy(mix, toy_plans[mix]) for mix in ("keep", "tile1"))
    assert streamed["losses"] == pytest.approx(kept["losses"], rel=1e-3)
    assert streamed["report"].get("to_host", 0) == 0


def measured(mix: str, seconds: float, peak: float, loss: float = 0.5) -> dict[str, Any]:
    record = {"kind": "measure", "name": f"unet/2048/8/{mix}", "seconds": [seconds], "losses": [loss], "gradient": 1.0}
    record["first_peak"] = 6 * GIB
    record |= {"allocated": int(peak * GIB), "reserved": 8 * GIB, "retries": 0, "report": {"to_host": 2 * GIB}}
    return record


def test_tables_from_records() -> None:
    three = foreseen(7, words="3 blocks", again=["a", "b", "c"])
    mixes = {"chosen": three, "keep": foreseen(12), "all": foreseen(8), "tile1": foreseen(4, tiles=[[64, 64]])}
    text = page.tables([
        prediction(**mixes),
        measured("chosen", 0.11, 7.0),
        measured("tile1", 0.1, 5.0, loss=0.505),
        {"kind": "failure", "name": "unet/2048/8/all", "why": "memory", "message": "OutOfMemoryError"},
        {"kind": "failure", "name": "unet/2048/16", "why": "late", "message": "a prediction"},
    ])  # fmt: skip
    ratios = "1.10 | 1.10 | 1.00 | 1.000 | 0.800 | 0.91"
    summary = f"| U-Net, 1 × 2048² | 8 | 1 | 1 | 3 blocks | 110 | tile1: some | 100 | {ratios} |"
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert summary in text
    assert rows[len(MORE) - len(MIXES) :][:4] == ["| tile1", "| **chosen**", "| all", "| keep"]
    assert "| **chosen** | 3 blocks | 110 | 1.10 | 100 | 7.00 | 7.00 | 1.000 | 6.00 | 8.00 | 2.00 | 0 |" in text
    assert "| all | some | out of memory | – | 100 | – | 8.00 |" in text
    assert "| keep | some | predicted too large | – | 100 | – | 12.00 |" in text
    assert "| U-Net, 1 × 2048² | 2 | 0.502500 | 1.0e-02 | 0.0e+00 |" in text


def test_what_does_the_same_as_the_chosen_mix_is_no_rival() -> None:
    """Swin-T's choice was 18% slower than «another» mix that computes the same blocks again, measured later."""
    mixes = {"chosen": foreseen(7), "again44+host": foreseen(7), "all": foreseen(6, moved=1)}
    found = [measured("chosen", 0.24, 7.0), measured("again44+host", 0.2, 7.0), measured("all", 0.2, 6.0)]
    (one,) = page.compared([prediction(**mixes), *found])
    assert one.twins("chosen") == ["chosen", "again44+host"]
    assert one.rivals == ["all"]
    assert one.chosen_over_best() == pytest.approx(0.22 / 0.2)
    assert one.apart("chosen") == pytest.approx(0.24 / 0.2)


def test_a_result_of_another_plan_than_is_predicted_now_does_not_count() -> None:
    """A planner that chooses otherwise would have been shown with the steps of what it chose before."""
    now = {"memory": "8GiB", "recompute": ["a"], "offload": [], "stream": None}
    other, same = 'memory = "8GiB"', 'memory = "8GiB"\nrecompute = ["a"]'
    found = [measured("chosen", 0.2, 7.0) | {"plan": other}, measured("keep", 0.1, 7.0) | {"plan": same}]
    (one,) = page.compared([prediction(chosen=foreseen(7, plan=now), keep=foreseen(7, plan=now)), *found])
    assert [*one.measured] == ["keep"]


def test_tiles_that_run_as_the_same_bands_are_one_mix() -> None:
    """Flat tiles once beat the chosen square ones by 10%: both ran as the same bands, whose steps differ by more."""
    bands, others = {"tiles": [[256, 4096]]}, {"tiles": [[144, 4096]]}
    mixes = {"chosen": foreseen(3, **bands), "tile75": foreseen(3, **others), "tile65": foreseen(3, **others)}
    mixes["flat2"] = foreseen(3, **bands)
    found = {"chosen": 1.4, "flat2": 1.2, "tile75": 1.3, "tile65": 1.7}
    (one,) = page.compared([prediction(**mixes), *(measured(mix, seconds, 3.0) for mix, seconds in found.items())])
    assert one.rivals == ["tile75"]
    assert one.chosen_over_best() == one.chosen_over_best(min) == 1.0
    assert one.seconds_ratio("tile75") == pytest.approx(0.1 / 1.5)


@pytest.mark.slow
def test_a_toy_run_writes_each_part(tmp_path: Path) -> None:
    output = tmp_path / "toy.jsonl"
    parts = ("swin_t/64/8/chosen", "swin_t/64/8/keep+host", "resnet50/128/8/tile1")
    command = [sys.executable, str(BENCHMARKS / "choice" / "run.py"), "--toy", "--device", "cpu", "--only", *parts]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    measured = {r["name"]: r for r in records if r["kind"] == "measure"}
    assert [*measured] == list(parts)
    assert measured["swin_t/64/8/keep+host"]["report"]["to_host"] > 0
    assert "stream = [64, 64]" in measured["resnet50/128/8/tile1"]["plan"]
    assert [r["name"] for r in records if r["kind"] == "predicted"] == ["swin_t/64/8", "resnet50/128/8"]
    assert str(tmp_path) not in output.read_text()
