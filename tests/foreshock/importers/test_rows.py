"""The log-probs of a dump: values above 0 are refused, placeholders and clamps are reported."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.errors import InvalidRolloutsError
from foreshock.importers.rows import all_zero, refuse_above_zero, to_log_probs

PLACES = ["file, line 1", "file, line 2"]


def test_value_above_zero_is_refused_with_its_place() -> None:
    values, sampled = [np.asarray([-0.1, -2.0]), np.asarray([-0.3, 0.5])], [np.ones(2, np.bool_)] * 2
    with pytest.raises(InvalidRolloutsError, match=r"file, line 2, field `x`: 0\.5 at token 1 is above 0"):
        refuse_above_zero(values, sampled, PLACES, "x")


def test_values_at_tokens_that_were_not_sampled_do_not_count() -> None:
    values, sampled = [np.asarray([0.7, -0.1])], [np.asarray([False, True])]
    refuse_above_zero(values, sampled, PLACES[:1], "x")
    kept, _ = to_log_probs(values, sampled, "x")
    assert kept[0].tolist() == [0.0, np.float32(-0.1)]


def test_minus_9999_is_minus_infinity() -> None:
    converted, notes = to_log_probs([np.asarray([-9999.0, -0.5])], [np.ones(2, np.bool_)], "x")
    assert converted[0].tolist() == [-np.inf, -0.5]
    assert "−inf" in notes[0]


def test_clamped_values_are_reported() -> None:
    values = [np.asarray([-20.0, -20.0, -0.5, -20.0])]
    _, notes = to_log_probs(values, [np.ones(4, np.bool_)], "x")
    assert "3 values are exactly -20" in notes[0]
    _, notes = to_log_probs([values[0] * 1.01], [np.ones(4, np.bool_)], "x")
    assert notes == []


def test_all_zero_is_a_placeholder() -> None:
    assert all_zero([np.zeros(3)], [np.ones(3, np.bool_)])
    assert not all_zero([np.asarray([0.0, -1e-9])], [np.ones(2, np.bool_)])
    assert not all_zero([np.zeros(3)], [np.zeros(3, np.bool_)])
