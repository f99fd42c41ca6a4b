"""Reading images from disk: `mural bench reading`.

`windows.py` reads windows and whole files of every format; `--page` writes its table and figure into README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import windows

if __name__ == "__main__":
    windows.main(sys.argv[1:])
