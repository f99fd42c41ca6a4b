"""Models that the documents train and that no library ships, in plain torch: nothing here knows about parallelism.

Perceptron      linear layers alone, the network of document `003`: digits.py
LeNet5          two convolutions and three linear layers, of document `004`: digits.py
CNN1D … CNN3D   a vanilla convolutional network for signals, images and volumes: cnn.py
UNet            U-Net in 1, 2 or 3 dims, scores each position; UNet2D, UNet3D: unet.py
FCN2D           FCN-8s on VGG-16, scores each pixel: fcn.py
ResNetV2        resnet_v2(depth=9 n + 2), resnet110_v2, resnet1001_v2, of the paper or of Keras: resnet_v2.py
AmoebaNetD      amoebanetd(layers, filters), cells that read the two before, of GPipe and MPI4DL: amoebanet.py

Published classifiers are torchvision's and timm's, `pip install "mural-train[models]"`: torchvision.models.resnet50.
"""

from mural.models.amoebanet import AmoebaNetD, amoebanetd
from mural.models.cnn import CNN1D, CNN2D, CNN3D
from mural.models.digits import LeNet5, Perceptron
from mural.models.fcn import FCN2D
from mural.models.resnet_v2 import ResNetV2, resnet110_v2, resnet1001_v2, resnet_v2
from mural.models.unet import UNet, UNet2D, UNet3D

__all__ = [
    "CNN1D",
    "CNN2D",
    "CNN3D",
    "FCN2D",
    "AmoebaNetD",
    "LeNet5",
    "Perceptron",
    "ResNetV2",
    "UNet",
    "UNet2D",
    "UNet3D",
    "amoebanetd",
    "resnet110_v2",
    "resnet1001_v2",
    "resnet_v2",
]
