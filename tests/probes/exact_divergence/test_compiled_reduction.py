"""The scalar functions have the documented precision, and loops over them use the widest vectors."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from foreshock_probes.exact_divergence import GivenLogits, exact_divergences
from foreshock_probes.exact_divergence.compiled_reduction import curvatures, exponential, exponential_sum, near_sums

# (e^d − 1 − d)/d² as a series; 25 terms are more than 80-bit numbers hold.
SERIES = [np.longdouble(1) / math.factorial(power) for power in range(2, 27)]


def curvature_by_series(d: float) -> float:
    return float(sum(term * np.longdouble(d) ** power for power, term in enumerate(SERIES)))


def test_curvatures_are_exact_within_their_range() -> None:
    for d in [*np.linspace(-1, 1, 401), 0.0, 1e-300, -1e-9]:
        found = curvatures(float(d))
        assert found == pytest.approx((curvature_by_series(d), curvature_by_series(-d)), rel=1e-15, abs=0.0)


def test_exponentials_are_exact() -> None:
    for x in np.linspace(-707, 708, 3001):
        assert exponential(float(x)) == pytest.approx(float(np.exp(np.longdouble(x))), rel=1e-15, abs=0.0)
    assert [exponential(-800.0), exponential(-math.inf), exponential(math.inf)] == [0.0, 0.0, math.inf]
    assert math.isnan(exponential(math.nan))


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="needs a processor with AVX-512")
def test_loops_use_the_widest_vectors() -> None:
    logits = GivenLogits(torch.zeros(1, 600))
    exact_divergences(logits, logits)
    functions: tuple[Any, ...] = (exponential_sum, near_sums)
    for function in functions:
        for code in function.inspect_asm().values():
            assert re.search(r"vfn?m(add|sub)\d+pd\b.*%zmm", code), function
