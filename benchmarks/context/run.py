"""What far-away pixels are worth: whole-image training beside patches, same model, same pixels, several seeds.

mural bench context                            train everything: minutes on a large GPU, days on a CPU
mural bench context --same                     the same training on 1, 2 and 4 ranks, beside plain torch
mural bench context --quick                    both at toy size, in a minute on a CPU: the numbers mean nothing
mural bench context --collect FILE.jsonl …     put the files of such runs together, as results/gpu.json
mural bench context --page                     write README.md's tables and the figures from results/
"""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness.options import DEVICES, device_of
from harness.results import Log, collect

from context import grid, page, same
from context.bounds import EDGES, reach
from context.cases import QUICK, SAME, Run, Settings

HERE = Path(__file__).resolve().parent
NUMBERS = ("steps", "images", "width", "pool", "tries", "seeds", "together", "workers")


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--minutes", type=float, default=600, help="begin nothing new after about this long (600)")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    parser.add_argument("--output", type=Path, help="file of the results, one line for each run")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to try it out: the numbers mean nothing")
    parser.add_argument("--same", action="store_true", help="only the comparison of ranks")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put files of results together, for the page")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figures, from results/")
    for name in NUMBERS:
        default = getattr(Settings(), name)
        parser.add_argument(f"--{name}", type=int, help=f"{default} by default")
    return parser.parse_args()


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that were asked for."""
    base = QUICK if options.quick else Settings()
    given = {name: getattr(options, name) for name in NUMBERS if getattr(options, name) is not None}
    return replace(base, **given)


def facts(device: str) -> dict[str, object]:
    """What this runs with."""
    cuda = device == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "device_memory": torch.cuda.mem_get_info()[1] if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "convolutions_in_tf32": torch.backends.cudnn.allow_tf32 if cuda else None,
    }


def main() -> None:
    """Train, put together, or write the page."""
    options = arguments()
    if options.page:
        page.write(HERE)
        return
    if options.collect:
        target = options.output or HERE / "results" / "gpu.json"
        print(f"{collect(options.collect, target)} records in {target.name}")
        return
    torch.set_num_threads(1)
    device, settings = device_of(options), settings_of(options)
    log = Log("context", options.output, options.known, options.minutes)
    log.write("versions", **facts(device))
    if options.quick:
        same.compare(replace(SAME, size=64, width=2, steps=3), Run("hilum", 2, 64, 2e-3, 0), device, ["2 ranks"], log)
    elif options.same:
        same.compare(SAME, Run("hilum", 5, SAME.size, 2e-3, 0), device, list(same.GRIDS), log)
    if not options.same:
        reaches = {arm.depth: reach(arm.depth) for arm in settings.arms}
        log.write("settings", **asdict(settings), edges=EDGES, reach=reaches)
        grid.measure(settings, device, log)
    log.say("finished")


if __name__ == "__main__":
    main()
