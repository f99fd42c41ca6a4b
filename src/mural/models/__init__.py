"""Plain torch models to train and to measure: nothing in this folder knows about parallelism.

Perceptron      linear layers alone, the network of document `003`: perceptron.py
LeNet5          two convolutions and three linear layers, of document `004`: lenet.py
CNN1D … CNN3D   a vanilla convolutional network for signals, images and volumes: cnn.py
UNet            U-Net in 1, 2 or 3 dims, scores each position; UNet2D, UNet3D: unet.py
FCN2D           FCN-8s on VGG-16, scores each pixel: fcn.py
AlexNet         alexnet, as in torchvision: alexnet.py
VGG             vgg11, vgg13, vgg16, vgg19, with batch norm or without, as in torchvision: vgg.py
ResNet          resnet18, resnet34, resnet50, resnet101, resnet152, as in torchvision: resnet.py
ResNetV2        resnet_v2(depth=9 n + 2), resnet110_v2, resnet1001_v2, of the paper or of Keras: resnet_v2.py
DenseNet        densenet121, densenet169, densenet201, as in torchvision: densenet.py
InceptionV3     inception_v3, with its auxiliary head in training, as in torchvision: inception.py
ViT             vit_tiny, vit_small, vit_base, scores images or pixels, as in timm: vit.py
AmoebaNetD      amoebanetd(layers, filters), cells that read the two before, of GPipe and MPI4DL: amoebanet.py
Swin            swin_tiny, scores images or pixels, as in torchvision: swin.py
"""

from mural.models.alexnet import AlexNet, alexnet
from mural.models.amoebanet import AmoebaNetD, amoebanetd
from mural.models.cnn import CNN1D, CNN2D, CNN3D
from mural.models.densenet import DenseNet, densenet121, densenet169, densenet201
from mural.models.fcn import FCN2D
from mural.models.inception import InceptionOutputs, InceptionV3, inception_v3
from mural.models.lenet import LeNet5
from mural.models.perceptron import Perceptron
from mural.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101, resnet152
from mural.models.resnet_v2 import ResNetV2, resnet110_v2, resnet1001_v2, resnet_v2
from mural.models.swin import Swin, swin_tiny
from mural.models.unet import UNet, UNet2D, UNet3D
from mural.models.vgg import VGG, vgg11, vgg13, vgg16, vgg19
from mural.models.vit import ViT, vit_base, vit_small, vit_tiny

__all__ = [
    "CNN1D",
    "CNN2D",
    "CNN3D",
    "FCN2D",
    "VGG",
    "AlexNet",
    "AmoebaNetD",
    "DenseNet",
    "InceptionOutputs",
    "InceptionV3",
    "LeNet5",
    "Perceptron",
    "ResNet",
    "ResNetV2",
    "Swin",
    "UNet",
    "UNet2D",
    "UNet3D",
    "ViT",
    "alexnet",
    "amoebanetd",
    "densenet121",
    "densenet169",
    "densenet201",
    "inception_v3",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet110_v2",
    "resnet152",
    "resnet1001_v2",
    "resnet_v2",
    "swin_tiny",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "vit_base",
    "vit_small",
    "vit_tiny",
]
