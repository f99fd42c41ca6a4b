"""Reading images from disk: `mural bench reading`.

`windows.py` reads windows and whole files of every format; `--page` writes its table and figure into README.md.
`--training` (`training.py`) trains on an image that does not fit in memory, and says how long it waits for its data.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import training
import windows

if __name__ == "__main__":
    if "--training" in sys.argv[1:]:
        training.main([word for word in sys.argv[1:] if word != "--training"])
    else:
        windows.main(sys.argv[1:])
