"""A learning rate that rose at once before the reward fell, and schedules that do not explain a fall."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import SteppedValues
from foreshock.diagnosis.rate_change import rate_before_fall
from tests.foreshock.diagnosis.test_cut_responses import fallen

_FALL = fallen(0.2).alerts[0]
_STEPS = np.arange(56, 87)


def rates(values: np.ndarray) -> SteppedValues:
    return SteppedValues(_STEPS.tolist(), values.tolist())


def test_a_rate_that_rose_at_a_resume_is_told_before_the_fall_and_is_to_be_set_back() -> None:
    rose = rates(np.where(_STEPS >= 74, 1.6e-5, 1e-6))
    (cause,) = rate_before_fall(rose, _FALL, [73])
    assert cause.title == "the learning rate rose × 16 at step 74, at the resume"
    history = fallen(0.2, cut=0.04)
    found = diagnose(type(history)(**{name: getattr(history, name) for name in history.__slots__} | {"rates": rose}))
    assert "the learning rate rose × 16 at step 74" in found.headline
    assert "Set the rate back to 1.0e-6" in found.next_steps[0]


@pytest.mark.parametrize(
    "values",
    [
        1e-6 * (_STEPS - 55) / 31,
        np.linspace(1e-5, 1e-6, 31),
        np.where(_STEPS >= 80, 1.6e-5, 1e-6),
        np.where(_STEPS >= 60, 1.6e-5, 1e-6),
        np.where(_STEPS == 74, 1.6e-5, 1e-6),
    ],
    ids=["warm-up", "decay", "after the fall", "long before", "one step"],
)
def test_other_schedules_explain_no_fall(values: np.ndarray) -> None:
    assert rate_before_fall(rates(values), _FALL, []) == ()
