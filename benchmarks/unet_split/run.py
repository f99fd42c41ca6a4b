"""A U-Net cut over ranks, to where each way of cutting fails: `mural bench unet_split`.

mural bench unet_split --parts predicted       what each way needs, from the graphs alone: no ranks, a minute
mural bench unet_split                         that, then 8 ranks of 16 GiB on one GPU; minutes
mural bench unet_split --list --known results/gpu.json    what is not known yet, with the seconds that each takes
mural bench unet_split --parts measured --only 'deep/GEMS' 'classic/recompute*' --known results/gpu.json
mural bench unet_split --quick --device cpu    a toy on ranks without a GPU, to try it out: the numbers mean nothing
mural bench unet_split --collect FILE.jsonl …  put the files of such runs together, as results/gpu.json
mural bench unet_split --page                  write README.md's tables and the figures from results/
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import page
import predictions
from agreement import PLANS
from campaign import Campaign
from harness.options import add_options, cap_of, device_of, numbers
from harness.results import Log, collect, matches, read
from harness.selection import add_selection, listing, matching
from harness.team import Pool
from nursery import forked
from published import SIDES

HERE = Path(__file__).resolve().parent
PARTS = ("predicted", "agreement", "measured")
MORE_SIDES = (3072, 4096, 6144, 8192)
QUICK_CAP = 6 * 2**20


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, minutes=30)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what is done ({','.join(PARTS)})")
    parser.add_argument("--nets", default="classic,deep", help="the U-Nets (classic,deep)")
    parser.add_argument("--ways", default="", help="names of ways, with semicolons (all)")
    add_selection(parser)
    parser.add_argument("--step", type=int, help="the largest sides are found to this (64)")
    parser.add_argument("--sides", type=numbers, default=(), help="sides to measure, in this order (the table's)")
    parser.add_argument("--sides-only", action="store_true", help="do not look for the largest side that fits")
    options = parser.parse_args()
    options.ranks = 4 if options.quick else 8
    options.nets = ["toy"] if options.quick else options.nets.split(",")
    options.parts = options.parts.split(",")
    options.ways = [way.strip() for way in options.ways.split(";") if way.strip()]
    options.step = options.step or (16 if options.quick else 64)
    options.bytes = QUICK_CAP if options.quick else cap_of(options)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def main() -> None:
    """Predict, measure, or only write the page."""
    options = arguments()
    if options.collect:
        print(collect(options.collect, HERE / "results" / "gpu.json"), "records")
        return
    if options.page:
        page.write(HERE)
        return
    folder = HERE / "results"
    if "predicted" in options.parts and not (options.list and not options.quick):
        forecasts = predictions.make(options.nets, options.ranks, options.bytes)
        print(predictions.text(forecasts, options.bytes))
        if not options.quick:
            predictions.save(forecasts, options.bytes, folder / "predicted.json")
    else:
        forecasts = predictions.load(folder / "predicted.json")
    if options.list:
        print(listing(missing(options, forecasts)))
    elif {"agreement", "measured"} & set(options.parts):
        measure(options, forecasts)


def chosen(options: argparse.Namespace, forecasts: predictions.Forecasts) -> list[tuple[str, str]]:
    """The U-Nets and ways that were asked for; a name is NET/WAY."""
    names = options.ways or list(dict.fromkeys(name for found in forecasts.values() for name in found))
    pairs = [(net, name) for name in names for net in options.nets if name in forecasts[net]]
    wanted = matching([f"{net}/{name}" for net, name in pairs], options.only)
    return [(net, way) for net, _, way in (name.partition("/") for name in wanted)]


def missing(options: argparse.Namespace, forecasts: predictions.Forecasts) -> dict[str, float]:
    """The seconds of each way whose largest side is not known for sure."""
    records = [record for file in options.known for record in read(file)]

    def known(net: str, way: str) -> bool:
        about = {"kind": "limit", "net": net, "way": way, "cap": options.bytes, "sure": True}
        return any(matches(record, about) for record in records)

    pairs = [(net, way) for net, way in chosen(options, forecasts) if not known(net, way)]
    return {f"{net}/{way}": forecasts[net][way].way.seconds for net, way in pairs}


def measure(options: argparse.Namespace, forecasts: predictions.Forecasts) -> None:
    """Run everything on teams of ranks."""
    device = device_of(options)
    output = options.output or (None if options.quick else HERE / "results" / f"{device}.jsonl")
    log = Log("unet_split", output, options.known, options.minutes)
    pool = Pool(device, start=forked)
    sides = (32, 64) if options.quick else (*SIDES, *MORE_SIDES)
    campaign = Campaign(log, pool, options.bytes, options.step, sides, options.sides)
    try:
        if "agreement" in options.parts:
            campaign.agree(PLANS, 32)
            campaign.drop()
        times = (1, 0.0, 5.0) if options.quick else (3, 1.0, 12.0)
        for net, name in chosen(options, forecasts) if "measured" in options.parts else ():
            campaign.run(net, forecasts[net][name], *times, search=not options.sides_only)
    finally:
        campaign.drop()
        pool.close()


if __name__ == "__main__":
    main()
