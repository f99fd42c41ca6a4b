"""Threads that read ahead: each computes alone, whatever the number of threads of the run is."""

from __future__ import annotations

import torch

from mural.memory.reader_threads import readers


def test_each_reader_computes_alone() -> None:
    """The number was set before torch first asked for it in that thread, which then took the run's number."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = readers(2)
        assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
        pool.shutdown()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
