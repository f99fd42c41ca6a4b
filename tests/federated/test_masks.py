"""Masks cancel in the sum and hide each part; the key agreement is that of RFC 7748."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mural.errors import PlanError
from mural.federated import Federation, Patience
from mural.federated.masks import Key, from_fixed, mask_of, masked, to_fixed


@given(st.integers(2, 6), st.integers(0, 40), st.integers(0, 2**20))
def test_masks_cancel_exactly(clinics: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    updates = torch.randn(clinics, count, dtype=torch.float64, generator=generator) * 1000
    keys = [Key(secret=(2**200 + seed + number).to_bytes(32, "little")) for number in range(clinics)]
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


def test_the_key_agreement_is_that_of_rfc_7748() -> None:  # section 5.2, the first vector
    key = Key(bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4"))
    shared = key.shared("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert shared.hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"


@pytest.mark.parametrize("public", ["", "00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "11" * 33, "no key"])
def test_a_public_key_that_gives_secrets_away_is_refused(public: str) -> None:
    with pytest.raises(PlanError, match="public key"):
        Key().shared(public)


def test_without_cryptography_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    clinic = Federation("a", "127.0.0.1:1", Patience(expected=3, quorum=3), masked=True)
    with pytest.raises(PlanError, match=r'pip install "mural-train\[federated\]"'):
        clinic.run(torch.nn.Linear(1, 1), 1, lambda _model, _number: 0)


@pytest.mark.parametrize("value", [1e12, float("nan"), float("inf")])
def test_values_beyond_the_masks_are_refused(value: float) -> None:
    with pytest.raises(PlanError, match="lower the rate"):
        to_fixed(torch.tensor([value]), parts=3)
