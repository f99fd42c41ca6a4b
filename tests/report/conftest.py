"""What tests of pages share: a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chromium import Browser, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium: run python tests/get_chromium.py, or let $CHROMIUM name one")
    with Browser(program) as running:
        yield running
