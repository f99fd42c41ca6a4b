"""Masks: numbers that hide each clinic's update from all others, and that cancel in the sum.

    clinic 0   u0 + m01 + m02
    clinic 1   u1 - m01       + m12
    clinic 2   u2       - m02 - m12
    sum        u0 + u1 + u2

Each pair of clinics agrees on a secret by exchanging public keys (X25519, from the package `cryptography`), and both
draw the same mask from it, a new one for every attempt at every round. Floating-point sums would not cancel, so updates
are first converted to fixed-point integers, which add modulo 2^64. A clinic's masked update looks like uniform noise,
unless all other clinics of the round conspire; with two clinics there is only one other, which knows the sum and its
own part.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mural.errors import PlanError, package

DIGITS = 30
"""Binary digits after the point of masked values."""


@dataclass(frozen=True)
class Key:
    """A secret that never leaves this process, and the public key that others get: X25519 of RFC 7748."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def public(self) -> str:
        """The public key, in hexadecimal digits."""
        own = cryptography("asymmetric.x25519").X25519PrivateKey.from_private_bytes(self.secret)
        return own.public_key().public_bytes_raw().hex()

    def shared(self, public: str) -> bytes:
        """The secret that the owners of this key and of a public key share.

        >>> a, b = Key(), Key()
        >>> a.shared(b.public) == b.shared(a.public)
        True
        """
        agreement = cryptography("asymmetric.x25519")
        try:
            other = agreement.X25519PublicKey.from_public_bytes(bytes.fromhex(public))
            return agreement.X25519PrivateKey.from_private_bytes(self.secret).exchange(other)
        except ValueError as error:
            raise PlanError(f"a clinic sent {public!r}, which is not a safe public key: {error}") from error


def cryptography(module: str) -> Any:
    """A module of the package `cryptography`, or an error that says how to install it."""
    return package(f"cryptography.hazmat.primitives.{module}", "federated", "masked=True", PlanError)


def mask_of(secret: bytes, occasion: str, count: int) -> Tensor:
    """That many uniform 64-bit numbers, the same for all who know the secret, and different on every occasion."""
    sha256 = cryptography("hashes").SHA256()
    seed = cryptography("kdf.hkdf").HKDF(sha256, 32, salt=None, info=occasion.encode()).derive(secret)
    stream = hashlib.shake_256(seed).digest(8 * count)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)


def masked(values: Tensor, me: int, key: Key, publics: Mapping[int, str], occasion: str) -> Tensor:
    """The values plus the masks that clinic `me` shares with each other clinic; over all clinics, the masks cancel."""
    hidden = values.clone()
    for other, public in publics.items():
        if other != me:
            mask = mask_of(key.shared(public), f"{occasion} {min(me, other)} {max(me, other)}", values.numel())
            hidden += mask if me < other else -mask
    return hidden


def to_fixed(values: Tensor, parts: int) -> Tensor:
    """The values as integers in units of 2^-30, rounded; a sum of `parts` such tensors does not overflow.

    >>> from_fixed(to_fixed(torch.tensor([0.5, -3.0]), parts=2)).tolist()
    [0.5, -3.0]
    """
    limit = 2.0**62 / parts
    scaled = values.double() * 2.0**DIGITS
    if not bool((scaled.abs() < limit).all()):
        largest = float(values.double().abs().max())
        raise PlanError(
            f"a value of this clinic's update, times its samples, is {largest:.3g}, but masks have room for "
            f"{limit * 2.0**-DIGITS:.3g} with {parts} clinics: its training diverged; lower the rate"
        )
    return scaled.round().to(torch.int64)


def from_fixed(values: Tensor) -> Tensor:
    """The values of integers in these units."""
    return values.double() * 2.0**-DIGITS
