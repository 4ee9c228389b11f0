"""Tests of the detectors on recorded curves; benchmarks/diagnosis/logs.py describes the curves and their limits."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis.logs import SHARED, Curve, judge, real_curves

CURVES = list(real_curves())

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not CURVES, reason=f"the recorded curves are not at {SHARED}"),
]


@pytest.mark.parametrize("curve", CURVES, ids=[curve.name for curve in CURVES])
def test_only_a_labelled_surge_moves_the_learning_rate(curve: Curve) -> None:
    assert judge(curve).is_right, curve.label


def test_every_labelled_curve_was_tested() -> None:
    kinds = [curve.label.kind for curve in CURVES]
    assert len(kinds) == 15
    assert (kinds.count("surge"), kinds.count("ramp")) == (2, 2)
