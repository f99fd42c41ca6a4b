"""What was published: figure 9 of document 000, 8 V100 GPUs of 16 GB, seconds of one forward and backward pass."""

SEQUENTIAL, NAIVE, AWARE = "sequential", "naive", "memory"
SECONDS: dict[str, dict[int, float]] = {
    SEQUENTIAL: {64: 0.07481, 128: 0.128, 256: 0.346, 512: 1.3},
    NAIVE: {64: 0.19, 128: 0.24, 256: 0.5424, 512: 1.44, 640: 1.9, 768: 2.76},
    AWARE: {64: 0.19, 128: 0.236, 256: 0.49, 512: 1.48, 640: 1.92, 768: 2.81, 1024: 5.96},
}
"""By column and side of the image; out of memory where a side is missing."""
SIDES = (64, 128, 256, 512, 640, 768, 1024, 2048)

BLOCKS = 13
"""The blocks of their U-Net: figure 8 keeps the last two on one GPU, 6 to 8 and 9 to 11 on two, and so has 13 blocks
if each of the five other GPUs has one of the first five."""
FIGURE_7 = (1, 3, 4, 5, 6, 7, 8, 10)
"""The first block of each GPU: the first two blocks on one, the last four on one, in between one or two."""
FIGURE_8 = (1, 2, 3, 4, 5, 6, 9, 12)


def seconds(column: str, side: int) -> str:
    """A cell of figure 9.

    >>> seconds("naive", 768), seconds("naive", 1024), seconds("naive", 4096)
    ('2.76', 'OOM', '–')
    """
    if side in SECONDS[column]:
        return f"{SECONDS[column][side]:g}"
    return "OOM" if side in SIDES else "–"
