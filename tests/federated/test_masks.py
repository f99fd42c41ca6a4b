"""Masks cancel in the sum and hide each part; the prime is the one that it is said to be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mural.errors import PlanError
from mural.federated.masks import PRIME, Key, from_fixed, mask_of, masked, to_fixed


@given(st.integers(2, 6), st.integers(0, 40), st.integers(0, 2**20))
def test_masks_cancel_exactly(clinics: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    updates = torch.randn(clinics, count, dtype=torch.float64, generator=generator) * 1000
    keys = [Key(secret=2**200 + seed + number) for number in range(clinics)]
    publics = {number: key.public for number, key in enumerate(keys)}
    fixed = [to_fixed(update, clinics) for update in updates]
    hidden = [masked(f, number, keys[number], publics, "round 3") for number, f in enumerate(fixed)]
    plain, found = sum(fixed, torch.zeros(count, dtype=torch.int64)), sum(hidden, torch.zeros(count, dtype=torch.int64))
    assert torch.equal(plain, found)
    torch.testing.assert_close(from_fixed(found), updates.sum(0), atol=clinics * 2.0**-31, rtol=0)


def test_what_one_clinic_sends_is_noise_and_new_every_time() -> None:
    keys = [Key(), Key(), Key()]
    publics = {number: key.public for number, key in enumerate(keys)}
    zeros = torch.zeros(20_000, dtype=torch.int64)
    first, again = (masked(zeros, 0, keys[0], publics, f"round {number}") for number in (1, 2))
    assert not torch.equal(first, again)
    for noise in (first, again, first - again):
        bits = (noise.unsqueeze(1) >> torch.arange(64)) & 1
        assert float((bits.double().mean(0) - 0.5).abs().max()) < 0.02  # 5.6 standard deviations


def test_both_ends_of_a_pair_draw_the_same_mask() -> None:
    a, b, c = Key(), Key(), Key()
    assert a.shared(b.public) == b.shared(a.public) != a.shared(c.public)
    assert torch.equal(mask_of(b"s", "x", 5), mask_of(b"s", "x", 7)[:5])


@pytest.mark.parametrize("public", [0, 1, PRIME - 1, PRIME + 5])
def test_a_public_key_that_gives_secrets_away_is_refused(public: int) -> None:
    with pytest.raises(PlanError, match="public key"):
        Key().shared(public)


@pytest.mark.parametrize("value", [1e12, float("nan"), float("inf")])
def test_values_beyond_the_masks_are_refused(value: float) -> None:
    with pytest.raises(PlanError, match="lower the rate"):
        to_fixed(torch.tensor([value]), parts=3)


def test_the_prime_is_that_of_rfc_3526() -> None:
    # 2^2048 - 2^1984 - 1 + 2^64 * (floor(2^1918 * pi) + 124476), with pi by Machin's formula
    unit = 1 << 2000
    arctans = [sum((-1) ** k * (unit // ((2 * k + 1) * x ** (2 * k + 1))) for k in range(900)) for x in (5, 239)]
    pi = 4 * (4 * arctans[0] - arctans[1]) >> (2000 - 1918)
    assert 2**2048 - 2**1984 - 1 + 2**64 * (pi + 124476) == PRIME
    half = (PRIME - 1) // 2
    assert all(pow(base, PRIME - 1, PRIME) == pow(base, half - 1, half) == 1 for base in (2, 3, 5, 7))
