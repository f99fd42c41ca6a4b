from pathlib import Path


def write(h: Path) -> None: ...
