"""mural beside its peers: `mural bench peers`.

Two parts. `cpu.py`: two CPU ranks of mural, of plain torch without any exchange, and of peers, on a small network.
`unet.py`: the classic U-Net on a GPU that several ranks share, each with 16 GiB of it. The second part runs where there
is a GPU, or with `--device cuda`, or with `--unet` on whatever there is; `--device cpu` alone means the first.
`--page` writes the tables of both into README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.options import DEVICES, device_of

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Choose the part, and hand it the options that are left."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--unet", action="store_true")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    for flag in ("--page", "--quick", "--help", "-h"):
        parser.add_argument(flag, action="store_true")
    options, rest = parser.parse_known_args()
    if "--collect" in rest or options.unet or (device_of(options) == "cuda" and not options.page):
        import unet  # noqa: PLC0415 (the parts need different packages)

        sys.argv = [sys.argv[0], *(a for a in sys.argv[1:] if a != "--unet")]
        unet.main()
        return
    import cpu  # noqa: PLC0415

    sys.argv = without_device(sys.argv)
    cpu.main()
    if options.page and (HERE / "results" / "gpu.json").is_file():
        import unet_page  # noqa: PLC0415

        unet_page.write(HERE)


def without_device(arguments: list[str]) -> list[str]:
    """The arguments without `--device cpu`, which the part for the CPU does not know.

    >>> without_device(["run.py", "--device", "cpu", "--quick"])
    ['run.py', '--quick']
    """
    kept = list(arguments)
    if "--device" in kept:
        at = kept.index("--device")
        del kept[at : at + 2]
    return [a for a in kept if not a.startswith("--device=")]


if __name__ == "__main__":
    main()
