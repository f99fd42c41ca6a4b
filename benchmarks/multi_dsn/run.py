"""Memory, utilisation and traffic of separation networks over ranks: `mural bench multi_dsn`.

mural bench multi_dsn                          on a GPU: ranks that share it, each with a cap
mural bench multi_dsn --quick                  toy sizes, on any device
mural bench multi_dsn --collect FILE.jsonl …   put the files of such runs together, as results/gpu.json
mural bench multi_dsn --page                   write README.md's tables from results/
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.case import GIB
from harness.options import add_options, device_of
from harness.results import Log, Record, collect
from harness.search import next_size
from harness.team import CaseFailed, Pool, Starter, Team

from multi_dsn import page
from multi_dsn.ways import BATCH, PUBLISHED_SIDE, SIDES, WAYS, Way

HERE = Path(__file__).resolve().parent
WIDTH, STEP = 32, 128
"""The paper's width of the first convolution; sides are multiples of this."""


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, minutes=9)
    parser.add_argument("--targets", type=int, nargs="+", default=(1, 4, 7), help="numbers of targets (1 4 7)")
    return parser.parse_args()


def measure(log: Log, team: Team, way: Way, side: int, cap: int, quick: bool) -> Record | None:
    """Every rank's numbers for a side; None, and a record of the failure, where it does not fit."""
    about: dict[str, Any] = {"way": way.name, "side": side, "cap": cap}
    asked = {"targets": way.targets, "placement": way.placement, "side": side, "width": 2 if quick else WIDTH}
    try:
        answers = team.ask("steps", limit=max(60.0, log.left), repeats=1 if quick else 5, **asked)
    except CaseFailed as failure:
        failure.note(log, f"{way.name}, {side}²", **about)
        return None
    record = log.write(
        "measure", **about, ranks=way.ranks, images=BATCH * (1 + way.targets),
        allocated=[a["allocated"] for a in answers], reserved=[a["reserved"] for a in answers],
        seconds=[max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)],
        computing=[a["computing"] for a in answers], bytes=[a["bytes"] for a in answers],
        messages=[a["messages"] for a in answers], added=[a["added"] for a in answers],
        parameters=[a["parameters"] for a in answers],
        predicted=answers[0]["predicted"], loss=answers[0]["loss"],
    )  # fmt: skip
    log.say(f"{way.name}, {side}²: at most {max(record['reserved']) / GIB:.2f} GiB, {min(record['seconds']):.3f} s")
    return record


def search(log: Log, pool: Pool, way: Way, cap: int, quick: bool) -> None:
    """The sides of the table as far as they fit, and then the largest side; ranks stay until one does not fit."""
    known = [r for r in log.records if r["kind"] == "measure" and r["way"] == way.name]
    peaks: dict[int, float] = {r["side"]: max(r["allocated"]) for r in known}
    failed: set[int] = set()

    def following() -> int | None:
        wanted = [side for side in ((16, 32) if quick else SIDES) if side not in peaks]
        if wanted and not failed:
            return wanted[0]
        if quick or not way.searched:
            return None
        return next_size(peaks, failed, guess=PUBLISHED_SIDE, step=STEP, cap=cap, dims=2)

    while log.left > 20 and following() is not None:
        try:
            with pool.team(way.ranks, cap if pool.device == "cuda" else None) as team:
                log.versions(team.facts)
                while log.left > 20 and (side := following()) is not None:
                    record = measure(log, team, way, side, cap, quick)
                    if record is None:
                        failed.add(side)
                        break
                    peaks[side] = max(record["allocated"])
        except CaseFailed as failure:
            log.say(f"{way.name}: {failure}"[:160])
            return
    if peaks and failed:
        log.write("limit", way=way.name, cap=cap, largest=max(peaks), failed=min(failed))


def main() -> None:
    """Measure, put together, or write the page."""
    options = arguments()
    if options.page:
        page.write(HERE)
        return
    if options.collect:
        print(f"{collect(options.collect, HERE / 'results' / 'gpu.json')} records in gpu.json")
        return
    device = device_of(options)
    log = Log("multi_dsn", options.output, options.known, options.minutes)
    pool = Pool(device, spares=6 if device == "cuda" and not options.quick else 0, start=Starter("multi_dsn.rank"))
    try:
        for way in (way for way in WAYS if way.targets in options.targets):
            if not way.searched or log.find("limit", way=way.name) is None:
                search(log, pool, way, way.cap(options.cap), options.quick)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
