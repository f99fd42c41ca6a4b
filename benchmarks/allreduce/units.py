"""Bytes and seconds in words."""

from __future__ import annotations


def sized(count: int) -> str:
    """A number of bytes in words.

    >>> sized(2**16), sized(2**26)
    ('64 KiB', '64 MiB')
    """
    return f"{count >> 20} MiB" if count >= 2**20 else f"{count >> 10} KiB"


def micro(seconds: float) -> str:
    """Seconds in microseconds, or in milliseconds where they are many.

    >>> micro(0.0000421), micro(0.0123), micro(1.5)
    ('42 µs', '12.3 ms', '1.50 s')
    """
    return (
        f"{seconds * 1e6:,.0f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:,.3g} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )
