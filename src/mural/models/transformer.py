"""What transformers for images share: dropped paths, the layers between two attentions, padding to whole patches."""

from torch import Tensor, nn
from torch.nn import functional as F

from mural.models.layers_by_dims import dropout


class DropPath(nn.Module):
    """The branch of a residual block, left out for a random part of the batch's images in training.

    Huang et al., "Deep networks with stochastic depth", 2016; what is kept is scaled to the same expectation.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return branch
        keep = 1 - self.rate
        kept = branch.new_empty((branch.shape[0], *(1 for _ in branch.shape[1:]))).bernoulli_(keep)
        return branch * kept.div_(keep)


def rates(last: float, blocks: int) -> list[float]:
    """How often each block's branches are dropped: never in the first, more with depth, `last` in the last.

    >>> rates(0.2, 3)
    [0.0, 0.1, 0.2]
    """
    return [last * block / max(1, blocks - 1) for block in range(blocks)]


def mlp(width: int, hidden: int, rate: float) -> list[nn.Module]:
    """The layers between two attentions: linear, GELU, linear, with dropout after each."""
    return [nn.Linear(width, hidden), nn.GELU(), dropout(rate), nn.Linear(hidden, width), dropout(rate)]


def pad_to_multiple(image: Tensor, step: int) -> Tensor:
    """The image with zeros below and on the right, up to multiples of the step; itself where none are missing.

    >>> import torch
    >>> pad_to_multiple(torch.zeros(1, 3, 30, 32), 16).shape
    torch.Size([1, 3, 32, 32])
    """
    below, right = (-extent % step for extent in image.shape[-2:])
    return F.pad(image, (0, right, 0, below)) if below or right else image


def initialize(model: nn.Module) -> None:
    """Draws the weights of all linear layers as vision transformers do: narrow, and without biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            for bias in (parameter for name, parameter in module.named_parameters() if name == "bias"):
                nn.init.zeros_(bias)
