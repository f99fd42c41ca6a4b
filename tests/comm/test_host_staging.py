"""Pinned memory: what CUDA has not let go of stays mapped. A runtime that refuses stands for CUDA."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import mural
from mural.comm import host_staging
from mural.comm.failure.connections import is_pause
from mural.comm.host_staging import Pinned


@dataclass
class Runtime:
    """CUDA's calls for host memory; the first `refusals` calls that unregister are refused."""

    refusals: int = 0
    registered: set[int] = field(default_factory=set)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.refusals:
            self.refusals -= 1
            return 900
        self.registered.remove(address)
        return 0


def pinned(monkeypatch: pytest.MonkeyPatch, refusals: int, capturing: bool = False) -> Runtime:
    runtime = Runtime(refusals)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(host_staging, "clear_error", lambda: None)
    return runtime


@pytest.mark.parametrize("capturing", [False, True])
def test_memory_that_cuda_still_has_stays_mapped(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    # It was unmapped all the same: copies to new memory at its addresses failed («invalid argument») or got lost.
    runtime = pinned(monkeypatch, refusals=1, capturing=capturing)
    buffer = Pinned(10_000)
    address = buffer.memory.data_ptr()
    del buffer
    assert [address for address, _ in host_staging._unused] == [address]
    assert runtime.registered == {address}
    runtime.refusals = 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    other = Pinned(4096)
    assert other.memory.data_ptr() != address
    del other
    assert not host_staging._unused
    assert not runtime.registered


class Frees(nn.Module):
    """Its forward frees a pinned buffer, as the garbage collector does anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return self.layer(x)


def test_a_buffer_that_ends_while_calls_are_recorded_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    # `data_ptr()` is 0 there: CUDA was asked to unregister nothing. Its error («invalid argument») was raised by the
    # next kernel or copy, in one of many runs, and the memory was unmapped while it was registered.
    runtime = pinned(monkeypatch, refusals=0)
    circle: list[Any] = [Pinned(4096)]
    circle.append(circle)
    del circle
    assert len(runtime.registered) == 1
    graph = mural.capture(Frees(), (1, 3, 8, 8))
    assert not runtime.registered
    assert [node.site for node in graph] == ["layer"]


def test_a_wait_goes_on_whatever_torch_appends_to_its_time_out() -> None:
    # With TORCH_SHOW_CPP_STACKTRACES=1, every wait of more than its own pause ended as if a peer had.
    assert is_pause(RuntimeError("Operation timed out!"))
    assert is_pause(RuntimeError("Operation timed out!\nException raised from wait at /pytorch/Work.cpp:93"))
    assert not is_pause(RuntimeError("Connection closed by peer [127.0.0.1]:4"))
