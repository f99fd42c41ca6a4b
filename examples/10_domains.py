"""Domains: images of one kind have labels, images of another have none, and one network learns from both.

    torchrun --nproc-per-node 2 examples/10_domains.py

Dark digits on white paper are the labelled source; the target is white chalk on a dark board, without labels. Only the
network and the plan differ from example 07: each rank has one domain. `Plan()` in one process prints the same losses.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import mural
from mural.domain import Ramp, Separation, classification_network

PLAN = mural.Plan(domain=2)
STEPS, BATCH, TRAINING = 300, 64, 700


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16, torch.tensor(labels)[order]


def main() -> None:
    torch.manual_seed(0)
    separation = Separation("mse", "mmd", ramp=Ramp(length=STEPS // 2))
    network = classification_network(["paper", "board"], 10, image=(1, 8, 8), width=16, separation=separation)
    pm = mural.parallelize(network, PLAN, loss=network.loss(F.cross_entropy))
    optimizer = torch.optim.Adam(pm.parameters(), lr=1e-3)

    images, labels = digits()
    paper, board = images[:TRAINING], 1 - images[TRAINING : 2 * TRAINING]
    draws = torch.Generator().manual_seed(0)  # the same batches on every rank
    for step in range(STEPS):
        some, others = (torch.randint(TRAINING, (BATCH,), generator=draws) for _ in range(2))
        network.at(step)  # where the ramp of the similarity term stands
        loss = pm.step(network.arranged({"paper": paper[some], "board": board[others]}), labels[some])
        optimizer.step()
        pm.zero_grad()
        if pm.world_mesh.rank == 0 and step % 50 == 0:
            print(f"step {step}  loss {loss.item():.4f}")

    pm.eval()
    held_out = images[2 * TRAINING :]
    (on_paper, on_board), _ = pm((held_out, 1 - held_out))  # a prediction for each domain
    for name, scores in (("paper", on_paper.full()), ("board", on_board.full())):
        right = (scores.argmax(1) == labels[2 * TRAINING :]).float().mean()
        if pm.world_mesh.rank == 0:
            print(f"{name}: {right:.3f} of the held-out digits are right")


if __name__ == "__main__":
    main()
