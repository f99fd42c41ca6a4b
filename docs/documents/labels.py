"""Digits that a row may have without a lookup: names, and settings that select a record. No measurement is one."""

from __future__ import annotations

import re

NAMES = (
    "1F1B", "AmoebaNet-18", "CNN1D", "CNN2D", "CNN3D", "DenseNet-121", "FCN2D", "H200", "Inception-v3", "K80",
    "LeNet-5", "MPI4DL", "ResNet-18", "ResNet-50", "ResNet-110", "ResNet-1001", "TF32", "UNet3D", "VGG-16", "VGG-19",
    "bfloat16", "cifar10_quick", "conv1", "conv2", "conv2_drop", "fc1", "fc2", "float32", "float64", "document `001`",
    "figure 7", "figure 8", "section 4", "12 convolutions", "12 layers",
)  # fmt: skip
SIZES = (
    "32²", "48²", "64²", "128²", "256²", "512²", "768²", "1024²", "1280²", "144³", "2048²", "2560²", "3072²", "4096²",
    "100,000²", "1 KiB", "8 KiB", "64 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB", "256 MiB", "512 MiB", "16 GiB",
    "2 ms", "25 MB/s", "kernel 3", "kernel 7", "32 → 32", "128 → 128", "width 32", "width 512", "width 4096",
)  # fmt: skip
RANKS = (
    "2 ranks", "3 ranks", "4 ranks", "6 ranks", "8 ranks", "12 ranks", "16 ranks", "on 2, 4 and 8 ranks",
    "2 to 16 ranks", "5 and 4 ranks", "2 CPU", "4 CPU",
    "10 CPU", "2 GPU", "4 GPU", "4 data ranks", "16 data ranks", "on 2", "on 3", "on 4", "on 5", "on 6",
    "on 8", "on 9", "on 10", "on 12", "on 28", "of 2", "of 8", "of 10", "against 8",
    "8 V100s", "2 cores", "16 cores", "4 hosts", "2 nodes", "2 processes", "8 processes",
    "4 processes", "16 processes", "32 processes", "80 processes", "1 and 9 ranks", "on 1, 5 and 10 ranks",
    "data 2", "data 4", "data 16", "stage 2", "stage 4", "GEMS 4",
    "domain 2", "spatial 2 × 1 × 1", "grid of 4 × 2", "`channel = 4`",
)  # fmt: skip
COUNTS = (
    "4 stages", "8 stages", "2 to 4 stages", "1 micro-batch", "8 micro-batches",
    "32 micro-batches", "with 8", "with 32", "2 images", "8 images", "25 images", "32 images", "34 images", "with 35",
    "batch 1", "batch 10", "batch 200", "batch 800", "at 50", "at 100", "at 200", "at 400", "at 800",
    "400 iterations", "4,000 iterations", "after 100", "7 targets", "1, 4 and 7 targets", "with 1, 4 and 7",
    "2 chunks", "8 chunks", "in 4", "in 8", "64 tensors", "in 4,096", "in 32,768", "within 20%", "2 · (N − 1)",
    "N · (1 + 1/K)",
)  # fmt: skip
LABELS = (*NAMES, *SIZES, *RANKS, *COUNTS)
LABEL = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(LABELS, key=len, reverse=True)))})(?!\w)")
TARGET = re.compile(r"\]\([^)]*\)")


def without_links(words: str) -> str:
    """A text without the targets of its links, which have digits of their own."""
    return TARGET.sub("]", words)


def unexplained(words: str) -> list[str]:
    """The digits in a text that are neither looked up nor part of a label.

    >>> unexplained("3.1 times as fast on 8 ranks of an H200, see [there](0002.md)")
    ['3.1']
    """
    return re.findall(r"\d[\d.,]*\d|\d", LABEL.sub("", without_links(words)))
