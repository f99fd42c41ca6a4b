"""A real Chromium for tests: found on this machine, spoken to over a pipe in the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

HOME = Path(sys.prefix) / "chromium"
"""Where `get_chromium.py` puts one, with libraries and a font for machines that have none."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, once the pipe's ends have the numbers that it expects."""
CACHED = ("chromium-*/chrome-linux*/chrome", "chromium_headless_shell-*/chrome*/*headless*shell")
KEYS = {"Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def chromium() -> str | None:
    """The path of a Chromium: $CHROMIUM, or the environment's own, or one on the PATH, or one of playwright's."""
    if named := os.environ.get("CHROMIUM"):
        return named
    if (HOME / "chromium").exists():
        return str(HOME / "chromium")
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    cached = (str(path) for pattern in CACHED for path in sorted(cache.glob(pattern), reverse=True))
    return next((path for name in NAMES if (path := shutil.which(name))), None) or next(cached, None)


def surroundings(program: str) -> dict[str, str]:
    """The environment of the browser's process; the one of `get_chromium.py` has its own libraries."""
    given = dict(os.environ)
    if Path(program).parent == HOME:
        given["LD_LIBRARY_PATH"] = str(HOME / "lib")
        if not Path("/etc/fonts").exists():
            given["FONTCONFIG_PATH"] = str(HOME)
    return given


class Browser:
    """A headless browser with one tab; `errors` is what its console has complained about.

    The pipe's ends are the browser's file descriptors 3 and 4; messages are JSON, each ended by a zero byte.
    """

    def __init__(self, program: str, width: int = 1280, height: int = 900, limit: float = 60) -> None:
        self.limit = limit
        self.errors: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        their_in, self._write = os.pipe()
        self._read, their_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--hide-scrollbars", "--disable-background-networking", "--disable-component-update"]
        flags += [f"--window-size={width},{height}", f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(their_in), str(their_out), program, *flags, "about:blank"],
            pass_fds=(their_in, their_out),
            env=surroundings(program),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._number, self._rest, self._session = 0, b"", ""
        try:
            self._begin(width, height)
        except BaseException:
            self.close()
            raise

    def _begin(self, width: int, height: int) -> None:
        pages = [target for target in self.ask("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        tab = pages[0]["targetId"] if pages else self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser, and leave nothing of it behind."""
        with contextlib.suppress(OSError, RuntimeError):
            self.ask("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer.get("result", {})

    def _next(self) -> dict[str, Any]:
        """The next message; complaints among them are noted."""
        end = time.monotonic() + self.limit
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {self.limit} s")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise OSError(f"the browser ended, code {self._process.poll()}")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(("file:", "data:")):
            self.errors.append(f"a request to {said['request']['url']}")

    def open(self, path: Path) -> None:
        """Show a file, and wait until it is loaded."""
        self.ask("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + self.limit
        while self.value("document.readyState + location.protocol") != "completefile:":
            if time.monotonic() > end:
                raise TimeoutError(f"{path} was not loaded within {self.limit} s")
            time.sleep(0.02)

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key and let it go."""
        typed = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = KEYS.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            text = typed if kind == "keyDown" else {}
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=8 * shift, **text
            )

    def write(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.ask("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click on the middle of the first element that a selector finds, 12 pixels below its upper edge at most."""
        x, y = self.value(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'nearest'}); const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + Math.min(box.height / 2, 12)]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Give the page another size."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def dark(self, wanted: bool) -> None:
        """Let the page believe that the user prefers a dark one."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write what is seen to a PNG file."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))
