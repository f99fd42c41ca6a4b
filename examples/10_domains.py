"""Domains: images of one kind have labels, images of another have none, and one network learns from both.

    torchrun --nproc-per-node 2 examples/10_domains.py

Sharp digits are the labelled source; blurred ones, of a phone, the target. Only the network, its batches and the plan
differ from example 07: each rank has one domain. `Plan()` in one process prints the same losses.
The digits come with scikit-learn (pip install scikit-learn).
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import mural
from mural.domain import Separation, Weights, classification_network

PLAN = mural.Plan(domain=2)
STEPS, BATCH, TRAINING = 200, 64, 700


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16, torch.tensor(labels)[order]


def blurred(images: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(images, 3, stride=1, padding=1)


def main() -> None:
    torch.manual_seed(0)
    separation = Separation("mse", "mmd", Weights(similarity=0.3))
    network = classification_network(["scanner", "phone"], 10, image=(1, 8, 8), code=32, width=8, separation=separation)
    pm = mural.parallelize(network, PLAN, loss=network.loss(F.cross_entropy))
    optimizer = torch.optim.Adam(pm.parameters(), lr=2e-3)

    images, labels = digits()
    scanner, phone = images[:TRAINING], blurred(images[TRAINING : 2 * TRAINING])
    draws = torch.Generator().manual_seed(0)  # the same batches on every rank
    for step in range(1, STEPS + 1):
        some, others = (torch.randint(TRAINING, (BATCH,), generator=draws) for _ in range(2))
        loss = pm.step(network.arranged({"scanner": scanner[some], "phone": phone[others]}), labels[some])
        optimizer.step()
        pm.zero_grad()
        if pm.world_mesh.rank == 0 and step % 50 == 0:
            print(f"step {step}  loss {loss.item():.4f}")

    pm.eval()
    held_out = images[2 * TRAINING :]
    predictions, _ = pm((held_out, blurred(held_out)))  # one for each domain
    for name, scores in zip(network.domains, predictions, strict=True):
        right = (scores.full().argmax(1) == labels[2 * TRAINING :]).float().mean()
        if pm.world_mesh.rank == 0:
            print(f"{name}: {right:.3f} of the held-out digits are right")


if __name__ == "__main__":
    main()
