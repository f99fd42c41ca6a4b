"""Domain separation: learn from one labelled source domain and unlabelled targets, over ranks by domain."""

from mural.domain.default_parts import classification_network, segmentation_network
from mural.domain.separation_config import Ramp, Separation, Weights
from mural.domain.separation_network import Predictor, SeparationLoss, SeparationNetwork

__all__ = [
    "Predictor",
    "Ramp",
    "Separation",
    "SeparationLoss",
    "SeparationNetwork",
    "Weights",
    "classification_network",
    "segmentation_network",
]
