"""Plain torch models to train and to measure: nothing in this folder knows about parallelism."""

from mural.models.cnn import CNN1D, CNN2D, CNN3D
from mural.models.fcn import FCN2D
from mural.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101, resnet152
from mural.models.unet import UNet, UNet2D, UNet3D

__all__ = [
    "CNN1D",
    "CNN2D",
    "CNN3D",
    "FCN2D",
    "ResNet",
    "UNet",
    "UNet2D",
    "UNet3D",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
]
