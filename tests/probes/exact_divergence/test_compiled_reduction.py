"""The exponential of the compiled reduction has the documented precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshock_probes.exact_divergence.compiled_reduction import exponential


def test_exponentials_are_exact() -> None:
    for x in np.linspace(-707, 708, 3001):
        assert exponential(float(x)) == pytest.approx(float(np.exp(np.longdouble(x))), rel=1e-15, abs=0.0)
    assert [exponential(-800.0), exponential(-math.inf), exponential(math.inf)] == [0.0, 0.0, math.inf]
    assert math.isnan(exponential(math.nan))
