"""Per-token formulas at the ends of their range, and with precomputed parts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from foreshock.measures.estimators import token
from tests.foreshock.measures.direct import TOKEN_FORMULAS

D = np.array([-30.0, -2.0, -0.5, -1e-3, -1e-9, 0.0, 1e-9, 1e-3, 0.5, 2.0, 30.0])


@pytest.mark.parametrize("name", ["k3_kl", "chi2_token", "reverse_chi2_token", "tv_token"])
def test_formula_equals_its_definition(name: str) -> None:
    found = getattr(token, name)(D)
    for value, expected in zip(found.tolist(), (TOKEN_FORMULAS[name](d) for d in D.tolist()), strict=True):
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-24)
    assert found.dtype == np.float64


def k3_in_rational_numbers(d: float) -> Fraction:
    x = Fraction(d)
    return sum((x**power / math.factorial(power) for power in range(3, 30)), x * x / 2)


def test_tiny_k3_is_accurate_and_never_negative() -> None:
    d = np.concatenate([np.logspace(-12, 0, 200), [2.0**-5, np.nextafter(2.0**-5, 0)]])
    for signed in (d, -d):
        expected = [float(k3_in_rational_numbers(value)) for value in signed.tolist()]
        np.testing.assert_allclose(token.k3_kl(signed), expected, rtol=2e-14, atol=0)
    assert token.k3_kl(np.zeros(1))[0] == 0.0


def test_overflow_is_infinite_without_a_warning() -> None:
    with np.errstate(all="raise"):
        assert token.k3_kl(np.array([1e4]))[0] == math.inf
        assert token.reverse_chi2_token(np.array([-1e4]))[0] == math.inf
        assert token.tv_token(np.array([-1e4]))[0] == 1.0
