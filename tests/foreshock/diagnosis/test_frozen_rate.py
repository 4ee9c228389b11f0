"""A learning rate that is 0: told from a schedule's last step and from a run without updates."""

from __future__ import annotations

import pytest

from foreshock.diagnosis.frozen_rate import zero_rate
from foreshock.diagnosis.history import SteppedValues


@pytest.mark.parametrize(
    ("rates", "is_told"),
    [([1e-6] * 50 + [0.0] * 10, True), ([1e-6] * 50 + [0.0] * 9, False), ([0.0] * 60, False), ([], False)],
)
def test_a_rate_of_0_is_told_after_ten_steps(rates: list[float], is_told: bool) -> None:
    found = zero_rate(SteppedValues(range(1, len(rates) + 1), rates))
    assert [each.title for each in found] == (["the learning rate is 0 since step 51"] if is_told else [])
    assert all(
        each.sentence.endswith("for 10 steps; it was 1.0e-6 before. No update changes the policy.") for each in found
    )
