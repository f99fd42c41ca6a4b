"""Checks of what a user hands to a model: each error gives the value, the rule and the smallest fix."""

from collections.abc import Collection, Sequence


def check_positive(model: str, **values: int) -> None:
    """Raises ValueError for the first value that is not an integer of at least 1.

    >>> check_positive("UNet", width=0)
    Traceback (most recent call last):
        ...
    ValueError: UNet got width=0, but width is an integer of at least 1: set width=1
    """
    for name, value in values.items():
        # Without a type checker anything arrives here: 2.5 would fail far away, True would pass for 1.
        if type(value) is not int or value < 1:
            raise ValueError(f"{model} got {name}={value!r}, but {name} is an integer of at least 1: set {name}=1")


def check_rate(model: str, **values: float) -> None:
    """Raises ValueError for the first value that is not a probability below 1.

    >>> check_rate("FCN2D", dropout=1)
    Traceback (most recent call last):
        ...
    ValueError: FCN2D got dropout=1, but dropout is in [0, 1): set dropout=0.0
    """
    for name, value in values.items():
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{model} got {name}={value!r}, but {name} is in [0, 1): set {name}=0.0")


def check_choice(model: str, name: str, value: object, choices: Collection[object]) -> None:
    """Raises ValueError for a value that is not among the choices.

    >>> check_choice("UNet", "block", "dense", ("plain", "residual"))
    Traceback (most recent call last):
        ...
    ValueError: UNet got block='dense', but block is one of 'plain', 'residual': set block='plain'
    """
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(
            f"{model} got {name}={value!r}, but {name} is one of {known}: set {name}={next(iter(choices))!r}"
        )


def check_image(model: str, shape: Sequence[int], channels: int, dims: int, smallest: int = 1) -> None:
    """Raises ValueError for the shape of a batch that a model of that many channels and dims cannot take.

    >>> check_image("UNet", (1, 3, 64, 8), channels=3, dims=2, smallest=16)
    Traceback (most recent call last):
        ...
    ValueError: UNet got extents (64, 8), but each is at least 16: pad to (64, 16)
    """
    missing = dims + 2 - len(shape)
    if missing != 0:
        raise ValueError(
            f"{model} got a tensor of shape {tuple(shape)}, but takes batch, channels and {dims} dims: "
            f"{'add' if missing > 0 else 'drop'} {abs(missing)}"
        )
    if shape[1] != channels:
        raise ValueError(
            f"{model} got {shape[1]} channels in shape {tuple(shape)}, but was built for {channels}: "
            f"build it with in_channels={shape[1]}"
        )
    extents = tuple(shape[2:])
    if min(extents) < smallest:
        padded = tuple(max(extent, smallest) for extent in extents)
        raise ValueError(f"{model} got extents {extents}, but each is at least {smallest}: pad to {padded}")
