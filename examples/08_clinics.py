"""Clinics: each process keeps its samples to itself, and all train one model.

    python examples/08_clinics.py

Three clinics with unequal numbers of samples take ten rounds. Every clinic is a separate process. On separate
machines the calls would be the same; here this script starts them. Updates are masked: no clinic sees another's.
The samples are digits that come with scikit-learn (pip install scikit-learn cryptography).
"""

import multiprocessing

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from mural.federated import Federation, Patience
from mural.ranks import free_port

SIZES = (100, 300, 900)
ROUNDS = 10


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def clinic(number: int, address: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = digits()
    first = sum(SIZES[:number])
    mine = slice(first, first + SIZES[number])

    def local(model: nn.Module, round: int) -> int:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for part in torch.arange(SIZES[number]).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(x[mine][part]), y[mine][part]).backward()
            optimizer.step()
        return SIZES[number]

    say = print if number == 0 else (lambda _: None)
    patience = Patience(expected=len(SIZES), quorum=len(SIZES))
    federation = Federation(f"clinic {number}", address, patience, host=number == 0, masked=True, say=say)
    federation.run(model, ROUNDS, local)
    if number == 0:
        held_out = slice(sum(SIZES), None)
        right = (model(x[held_out]).argmax(1) == y[held_out]).float().mean()
        print(f"accuracy on images that no clinic has: {right:.3f}")


def main() -> None:
    address = f"127.0.0.1:{free_port()}"
    processes = [multiprocessing.Process(target=clinic, args=(number, address)) for number in range(len(SIZES))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
