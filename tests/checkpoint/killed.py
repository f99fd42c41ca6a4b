"""Processes that are killed while they save: run by test_kills.py.

python killed.py stages FOLDER          one process after the other, each killed at another point of a save
python killed.py forever FOLDER R W     rank R of W: resumes, then saves step after step until it is killed
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mural
import mural.checkpoint.checkpoints as checkpoint
import mural.checkpoint.folder as folder
import mural.checkpoint.saving as saving
from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.files import as_bytes


def state(step: int, rows: int = 500) -> dict[str, Tensor]:
    """Tensors that all say which step they are of."""
    return {f"t{k}": torch.full((rows, 100 * k + 1), float(step)) for k in range(8)} | {"step": torch.tensor(step)}


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and then death."""
    return lambda *args, **kwargs: die(function(*args, **kwargs))


def half(file: Any, tensor: Tensor) -> int:
    """Half of the bytes, and then death."""
    file.write(as_bytes(tensor)[: tensor.nbytes // 2])
    file.flush()
    return die()


def rename(count: int, done_first: bool = False) -> None:
    """Death instead of the rename of that number, or right after it."""
    real, done = Path.rename, []

    def counted(self: Path, target: Path) -> Path:
        done.append(target)
        if len(done) == count and not done_first:
            die()
        result = real(self, target)
        return die() if len(done) == count else result

    Path.rename = counted  # type: ignore[method-assign]


def patch(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


# What is killed, and the steps that must be there afterwards; before, 1 and 2 are there, and two are kept.
STAGES: dict[str, tuple[Callable[[], None], int, list[int]]] = {
    "before the file": (lambda: patch(saving, "header", die), 3, [1, 2]),
    "half a tensor": (lambda: patch(saving, "write_tensor", half), 3, [1, 2]),
    "before the sync": (lambda: patch(os, "fsync", die), 3, [1, 2]),
    "before the manifest": (lambda: patch(saving, "write_synced", die), 3, [1, 2]),
    "after the manifest": (lambda: patch(saving, "publish", die), 3, [1, 2, 3]),
    "before the rename": (lambda: rename(1), 3, [1, 2, 3]),
    "after the rename": (lambda: patch(saving, "publish", after(folder.publish)), 3, [1, 2, 3]),
    "while one is removed": (lambda: rename(2, True), 3, [2, 3]),
    "after it is removed": (lambda: patch(checkpoint, "remove", after(folder.remove)), 3, [2, 3]),
    "replaced, old one there": (lambda: rename(1), 2, [1, 2]),
    "replaced, neither there": (lambda: rename(2), 2, [1, 2]),
}


def stages(root: Path) -> None:
    """Kill one process at each stage."""
    for name, (prepare, step, _) in STAGES.items():
        child = os.fork()
        if child == 0:
            checkpoints = Checkpoints(root / name, mural.init(), keep=2)
            for before in (1, 2):
                checkpoints.save(before, state(before, 5), {"step": before})
            checkpoints.wait()
            prepare()
            checkpoints.save(step, state(step, 5), {"step": step})
            checkpoints.wait()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"{name}: ended by {status}, not killed")


def forever(root: Path, rank: int, world: int) -> None:
    """Resume, and save until killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(root / f"store-{os.getppid()}-{sys.argv[5]}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    checkpoints = Checkpoints(root / "run", mural.init(data=world), keep=2)
    step = 0
    if checkpoints.latest() is not None:
        snapshot = checkpoints.read()
        targets = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
        snapshot.load(targets)
        step = snapshot.step
        if not all((tensor == step).all() for tensor in targets.values()):
            sys.exit("the tensors are not of one step")
    while True:
        step += 1
        checkpoints.save(step, state(step), {"step": step})


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "stages":
        stages(Path(sys.argv[2]))
    else:
        forever(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
