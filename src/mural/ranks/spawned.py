"""A local rank: what a process that `run_local` starts does, from its start to its answer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from mural.comm.hosts import LOCAL_STORE
from mural.errors import MuralError, PeerError, PlanError, told
from mural.ranks.identity import resolve
from mural.ranks.join import leave, start

ATTEMPT = "MURAL_ATTEMPT"
PR_SET_PDEATHSIG = 1
FOREIGN = re.compile("TORCHELASTIC_.*|MASTER_(ADDR|PORT)|GROUP_.*|ROLE_.*")
"""Variables of an enclosing torchrun, which the local ranks are not part of."""


UNGUARDED = 79
"""The exit code of a rank whose script starts ranks when it is imported."""


@dataclass(frozen=True)
class Orders:
    """What the ranks of one attempt have in common."""

    ranks: int
    store: str
    backend: str
    gpus: int
    threads: int
    attempt: int
    timeout: float
    parent: int


@dataclass(frozen=True)
class Answer:
    """What a rank sends before it ends: the function's value, or the traceback of what it raised.

    It is `excused` if another rank's failure or SIGINT made it raise. `told` is the text of an error that
    needs no traceback; it is `final` if the same would be raised again.
    """

    value: Any = None
    raised: str = ""
    excused: bool = False
    told: str = ""
    final: bool = False


def serve(rank: int, orders: Orders, answers: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Join the process group, call the function, and send the answer; only rank 0's value travels."""
    end_with_parent(orders.parent)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the parent alone, which forwards it once
    declare(os.environ, rank, orders)
    torch.set_num_threads(orders.threads)
    if orders.gpus:
        torch.cuda.set_device(rank % orders.gpus)
    try:
        start(resolve(os.environ), orders.backend, orders.timeout)
        value = function(rank, *args)
        answers.send(Answer(value if rank == 0 else None))
    except SystemExit:
        raise
    except BaseException as error:
        final = isinstance(error, MuralError) and not isinstance(error, PeerError)
        answers.send(Answer(None, traceback.format_exc(), excused(error), told(error), final))
        sys.exit(1)
    finally:
        leave()


def leave_unguarded() -> None:
    """End this process if it is a new rank that is still importing its parent's script; the parent says why."""
    if getattr(current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def check_importable(function: Callable[..., Any]) -> None:
    """Raise if a new process cannot import the function: a cell of a notebook or an interactive session defines it."""
    while isinstance(function, partial):
        function = function.func
    if getattr(function, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        name = getattr(function, "__name__", str(function))
        raise PlanError(
            f"{name} is defined in a notebook or an interactive session, from which new ranks cannot import it: write "
            f"it to a file next to the notebook, as work.py, and begin by `from work import {name}`"
        )


def declare(environ: MutableMapping[str, str], rank: int, orders: Orders) -> None:
    """Set the variables that tell this process, and libraries in it, that it is a local rank."""
    for name in [name for name in environ if FOREIGN.fullmatch(name)]:
        del environ[name]
    environ[LOCAL_STORE], environ[ATTEMPT] = orders.store, str(orders.attempt)
    environ["RANK"] = environ["LOCAL_RANK"] = str(rank)
    environ["WORLD_SIZE"] = environ["LOCAL_WORLD_SIZE"] = str(orders.ranks)


def attempt() -> int:
    """How often the ranks of this run have been restarted: by `run_local`, or by torchrun --max-restarts."""
    return int(os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def excused(error: BaseException | None) -> bool:
    """Whether an error only says that another rank has ended, or that SIGINT came."""
    while error is not None:
        if isinstance(error, PeerError | KeyboardInterrupt) or re.search(
            "(closed|reset) by peer|Broken pipe", str(error)
        ):
            return True
        error = error.__cause__
    return False


def end_with_parent(parent: int) -> None:
    """Let this process end as soon as its parent does, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
        return
    watched = parent_process()

    def watch() -> None:
        if watched is not None:
            wait([watched.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="mural-parent").start()
