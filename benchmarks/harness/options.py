"""The options that benchmarks on teams of ranks share, and the choice of a device."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from harness.case import GIB

DEVICES = ("auto", "cuda", "cpu")


def add_options(parser: argparse.ArgumentParser, minutes: float) -> None:
    """Add the options to a parser."""
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--minutes", type=float, default=minutes, help=f"stop after about this long ({minutes:g})")
    parser.add_argument("--cap", type=float, default=16.0, help="memory of each rank in GiB (16)")
    parser.add_argument("--ranks", type=numbers, default=(1, 8, 4, 2), help="numbers of ranks, in order (1,8,4,2)")
    parser.add_argument("--spares", type=int, default=8, help="processes to start ahead of need, on a GPU (8)")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="files of results that need not come again")
    parser.add_argument("--output", type=Path, help="file of the results, one line for each measurement")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to try it out: the numbers mean nothing")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put files of results together, for the page")
    parser.add_argument("--page", action="store_true", help="only write README.md and the figures, from results/")


def numbers(text: str) -> tuple[int, ...]:
    """Numbers from a list with commas.

    >>> numbers("1,8")
    (1, 8)
    """
    return tuple(int(part) for part in text.split(","))


def device_of(options: argparse.Namespace) -> str:
    """The device that was asked for, or that is there; torch is not imported here, so the driver's tool tells."""
    if options.device != "auto":
        return options.device
    return "cuda" if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") else "cpu"


def cap_of(options: argparse.Namespace) -> int:
    """The memory of each rank in bytes."""
    return int(options.cap * GIB)
