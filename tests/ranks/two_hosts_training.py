"""A short training on a grid of 2 × 2 ranks, and the same in one process; rank 0 writes how far apart the weights are.

torchrun --nnodes 2 --nproc-per-node 2 … two_hosts_training.py FILE [BACKEND]
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mural
from law import image
from mural.models import UNet

STEPS = 3


def train(model: nn.Module, mesh: mural.Mesh | None) -> list[float]:
    """The losses of a few steps."""
    losses: list[float] = []
    for step in range(STEPS):
        x, target = image(1, 3, 44, 36, seed=step), (image(1, 44, 36, seed=90 + step) > 0).long()
        if mesh is not None:
            x, target = mural.shard(x, mesh), mural.shard(target, mesh, dims=(1, 2))
        model.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        if mesh is not None:
            mural.reduce_gradients(model, mesh)
        with torch.no_grad():  # torch.optim would load torch's compiler first, for many seconds
            for p in model.parameters():
                p -= 0.1 * p.grad
        losses.append(loss.item())
    return losses


def main(file: Path, backend: str | None) -> None:
    torch.set_num_threads(1)
    mesh = mural.init(spatial=(2, 2), backend=backend, timeout=60)
    torch.manual_seed(0)
    sharded = UNet(width=4, depth=2).double()
    torch.manual_seed(0)
    plain = UNet(width=4, depth=2).double()
    losses, expected = train(sharded, mesh), train(plain, None)
    weights = zip(sharded.parameters(), plain.parameters(), strict=True)
    apart = max(float((p - q).abs().max()) for p, q in weights)
    interfaces: list[object] = [None] * mesh.world
    dist.all_gather_object(interfaces, [name for _, name in socket.if_nameindex() if name != "lo"])
    if mesh.rank == 0:
        found = {"apart": apart, "losses": losses, "expected": expected, "interfaces": interfaces}
        file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
