"""The terms of a separation network as modules: each call is a call-site, which a plan can place on a rank.

They are computed where their inputs are, so that codes and numbers travel between ranks, and images do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from mural.domain.code_losses import difference, discrepancy, pooled, reversed_gradient, scale_invariant_error
from mural.errors import DataError

ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "scale-invariant": scale_invariant_error,
}
"""How a reconstruction is compared with its image, by the names of `Separation.reconstruction`."""


class Reconstruction(nn.Module):
    """What the decoder makes of the sum of an image's two codes, compared with the image."""

    def __init__(self, decoder: nn.Module, error: str):
        super().__init__()
        self.decoder, self.error = decoder, ERRORS[error]

    def forward(self, shared: Tensor, private: Tensor, image: Tensor) -> Tensor:
        """The error of the reconstruction."""
        if shared.shape != private.shape:
            raise DataError(
                f"the shared code has the shape {tuple(shared.shape)}, the private one {tuple(private.shape)}: the "
                f"decoder takes their sum; give both encoders the same number of channels and the same strides"
            )
        made = self.decoder(shared + private)
        if made.shape != image.shape:
            raise DataError(
                f"the decoder made {tuple(made.shape)} for images of {tuple(image.shape)}: they are compared value by "
                f"value; give all domains images of the size that it makes, or a decoder that follows the code's size"
            )
        return self.error(made, image)


class Difference(nn.Module):
    """How far the shared and the private code of a domain are from orthogonal."""

    def forward(self, shared: Tensor, private: Tensor) -> Tensor:
        """The difference loss."""
        return difference(shared, private)


class Similarity(nn.Module):
    """A term that makes the shared codes of all domains alike.

    `across` says whether it looks at the source's code next to a target's: that code then travels to the target's rank.
    `strength` is where the ramp stands.
    """

    across: ClassVar[bool] = False
    strength: float = 1.0


class Adversary(Similarity):
    """A classifier of domains, which learns to tell them apart; encoders get its gradient reversed."""

    def __init__(self, classifier: nn.Module):
        super().__init__()
        self.classifier = classifier

    def forward(self, code: Tensor, domain: int) -> Tensor:
        """The cross-entropy of a domain's codes with its number."""
        scores = self.classifier(reversed_gradient(pooled(code), self.strength))
        return -F.log_softmax(scores, 1).select(1, domain).mean()


class Discrepancy(Similarity):
    """The maximum mean discrepancy between the codes of the source and of a target."""

    across: ClassVar[bool] = True

    def forward(self, code: Tensor, source: Tensor) -> Tensor:
        """The discrepancy, as strong as the ramp says."""
        return self.strength * discrepancy(pooled(code), pooled(source))
