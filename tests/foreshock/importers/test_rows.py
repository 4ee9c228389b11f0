"""The kind of a dump's log-probs is told from its values, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from foreshock.errors import InvalidRolloutsError
from foreshock.importers.dumps import Kind
from foreshock.importers.rows import all_zero, kind_of, to_log_probs

RANDOM = np.random.default_rng(0)
LOG_PROBS = [-RANDOM.exponential(0.4, 80) for _ in range(4)]
EVERY = [np.ones(80, np.bool_)] * 4
PLACES = [f"file, line {row}" for row in range(1, 5)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("log_probs", LOG_PROBS),
        ("negative_log_probs", [-row for row in LOG_PROBS]),
        ("probabilities", [np.exp(row) for row in LOG_PROBS]),
    ],
)
def test_each_kind_is_told_and_becomes_log_probs(kind: Kind, values: list[np.ndarray]) -> None:
    assert kind_of(values, EVERY, PLACES, "x") == kind
    converted, notes = to_log_probs(values, EVERY, kind, "x")
    np.testing.assert_allclose(np.concatenate(converted), np.concatenate(LOG_PROBS), rtol=2e-6, atol=1e-7)
    assert bool(notes) == (kind != "log_probs")


def test_values_of_both_signs_name_the_first_row() -> None:
    values = [row.copy() for row in LOG_PROBS]
    values[2][7] = 0.5
    with pytest.raises(InvalidRolloutsError, match=r"file, line 3, field `x`: 0\.5 at token 7 is above 0"):
        kind_of(values, EVERY, PLACES, "x")


@pytest.mark.parametrize("values", [[0.9, 0.8, 0.95], [0.05] * 200 + [0.9]])
def test_values_that_fit_two_kinds_are_refused(values: list[float]) -> None:
    with pytest.raises(InvalidRolloutsError, match=r"may be probabilities or negated log-probs.*--log-probs"):
        kind_of([np.asarray(values)], [np.ones(len(values), np.bool_)], ["file, line 1"], "x")


def test_values_at_tokens_that_were_not_sampled_do_not_count() -> None:
    sampled = [np.asarray([False, True])]
    assert kind_of([np.asarray([0.7, -0.1])], sampled, ["file, line 1"], "x") == "log_probs"
    converted, _ = to_log_probs([np.asarray([0.7, -0.1])], sampled, "log_probs", "x")
    assert converted[0].tolist() == [0.0, np.float32(-0.1)]


def test_minus_9999_is_minus_infinity() -> None:
    converted, notes = to_log_probs([np.asarray([-9999.0, -0.5])], [np.ones(2, np.bool_)], "log_probs", "x")
    assert converted[0].tolist() == [-np.inf, -0.5]
    assert "−inf" in notes[0]


def test_clamped_values_are_reported() -> None:
    values = [np.asarray([-20.0, -20.0, -0.5, -20.0])]
    _, notes = to_log_probs(values, [np.ones(4, np.bool_)], "log_probs", "x")
    assert "3 values are exactly -20" in notes[0]
    _, notes = to_log_probs([values[0] * 1.01], [np.ones(4, np.bool_)], "log_probs", "x")
    assert notes == []


def test_all_zero_is_a_placeholder() -> None:
    assert all_zero([np.zeros(3)], [np.ones(3, np.bool_)])
    assert not all_zero([np.asarray([0.0, -1e-9])], [np.ones(2, np.bool_)])
    assert not all_zero([np.zeros(3)], [np.zeros(3, np.bool_)])
