"""Checkpoints of tensors on a GPU: through pinned memory, and on to any other device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mural
from mural.checkpoint.checkpoints import Checkpoints
from mural.checkpoint.state import restore, state_of
from mural.comm.host_staging import Pinned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device="cuda"), capturable=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)).to(device)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    device = next(model.parameters()).device
    for step in range(steps):
        optimizer.zero_grad()
        image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(step)).to(device)
        F.mse_loss(model(image), torch.zeros(2, 2, 14, 14, device=device)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_to_the_last_bit(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    checkpoints = Checkpoints(tmp_path, mural.init())
    model, other = network("cuda"), network("cuda")
    optimizer, its = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    train(model, optimizer, 3)
    state = state_of(model, optimizer)
    checkpoints.save(3, state.tensors, state.values)
    assert isinstance(checkpoints.staging.buffer, Pinned)
    train(model, optimizer, 3)  # while it is written
    restore(checkpoints.read(), other, its)
    train(other, its, 3)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for parameter, own in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, its.state[own][key])
            assert value.device == its.state[own][key].device
    checkpoints.close()


@pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_from_one_device_to_another(tmp_path: Path, source: str, target: str) -> None:
    checkpoints = Checkpoints(tmp_path, mural.init())
    model, other = network(source), network(target)
    optimizer, its = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    train(model, optimizer, 3)
    state = state_of(model, optimizer)
    checkpoints.save(3, state.tensors, state.values)
    restore(checkpoints.read(), other, its)
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), other.state_dict()[name].cpu())
        assert other.state_dict()[name].device.type == target
    train(other, its, 1)
    assert its.state[next(other.parameters())]["exp_avg"].device.type == target
    checkpoints.close()
