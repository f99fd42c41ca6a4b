"""The collector while a step runs: the objects of before are left alone, and none of them is lost for good."""

from __future__ import annotations

import gc
import weakref

import pytest

from mural.engine import garbage
from mural.engine.garbage import older_objects_aside


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.me = self


def test_older_objects_are_frozen_in_the_block_alone() -> None:
    with older_objects_aside():
        assert gc.get_freeze_count() > 1000
        with older_objects_aside():
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() > 1000, "the inner block thawed what the outer one had frozen"
    assert gc.get_freeze_count() == 0


def test_garbage_between_steps_is_collected() -> None:
    gone = weakref.ref(Cycle())
    with older_objects_aside():
        assert gone() is None


def test_garbage_of_the_block_is_collected_in_it() -> None:
    with older_objects_aside():
        gone = weakref.ref(Cycle())
        gc.collect()
        assert gone() is None


def test_old_garbage_is_collected_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full collections that fall into steps never see what was there before: its memory would stay for good."""
    old = Cycle()
    gone = weakref.ref(old)
    gc.collect(1)  # it is among the oldest now
    del old
    with older_objects_aside():
        pass
    monkeypatch.setattr(garbage, "_looked", [garbage._looked[0] - 2 * garbage.EVERY])
    with older_objects_aside():
        assert gone() is None


def test_a_freeze_of_somebody_else_stays() -> None:
    gc.freeze()
    try:
        with older_objects_aside():
            pass
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_what_python_itself_keeps_frozen_is_nobodys_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 frozen objects: full collections in steps took 0.2 s each, while the GPU waited."""
    frozen = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen() + 375)
    with older_objects_aside():
        assert frozen() > 1000
