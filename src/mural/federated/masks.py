"""Masks: numbers that hide each clinic's update from all others, and that cancel in the sum.

    clinic 0   u0 + m01 + m02
    clinic 1   u1 - m01       + m12
    clinic 2   u2       - m02 - m12
    sum        u0 + u1 + u2

Each pair of clinics agrees on a secret by Diffie and Hellman's exchange of public keys, and both draw the same mask
from it, anew for every attempt at every round. Floating-point sums would not cancel, so updates become whole numbers
of fixed point first, which add modulo 2^64. Anyone who sees a clinic's masked update sees uniform noise, unless all
other clinics of the round conspire; with two clinics there is only one other, which knows the sum and its own part.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mural.errors import PlanError

PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74"
    "020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F1437"
    "4FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF05"
    "98DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB"
    "9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF695581718"
    "3995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
"""The safe prime of 2048 bits that RFC 3526 gives as group 14; 2 generates."""
EXPONENT_BITS = 256
DIGITS = 30
"""Binary digits behind the point of masked values."""


def secret_exponent() -> int:
    """A secret of this process, from the system's source of randomness."""
    return secrets.randbits(EXPONENT_BITS) | 1 << (EXPONENT_BITS - 1)


@dataclass(frozen=True)
class Key:
    """A secret that never leaves this process, and the public key that others get."""

    secret: int = field(default_factory=secret_exponent, repr=False)

    @property
    def public(self) -> int:
        """What others get."""
        return pow(2, self.secret, PRIME)

    def shared(self, public: int) -> bytes:
        """The secret that this key's owner and that of a public key have in common.

        >>> a, b = Key(), Key()
        >>> a.shared(b.public) == b.shared(a.public)
        True
        """
        if not 1 < public < PRIME - 1:
            raise PlanError("a clinic sent a public key that gives its secrets away: it is not one of this protocol")
        common = pow(public, self.secret, PRIME)
        return hashlib.sha256(common.to_bytes(256, "big")).digest()


def mask_of(secret: bytes, occasion: str, count: int) -> Tensor:
    """As many uniform numbers of 64 bits, the same for all who know the secret, others on every occasion."""
    stream = hashlib.shake_256(secret + occasion.encode()).digest(8 * count)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)


def masked(values: Tensor, me: int, key: Key, publics: Mapping[int, int], occasion: str) -> Tensor:
    """The values behind the masks that clinic `me` shares with each other one; all clinics' add up to the plain sum."""
    hidden = values.clone()
    for other, public in publics.items():
        if other != me:
            mask = mask_of(key.shared(public), f"{occasion} {min(me, other)} {max(me, other)}", values.numel())
            hidden += mask if me < other else -mask
    return hidden


def to_fixed(values: Tensor, parts: int) -> Tensor:
    """Whole numbers in units of 2^-30, rounded; a sum of that many such tensors does not overflow.

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
    """The numbers that whole numbers in these units stand for."""
    return values.double() * 2.0**-DIGITS
