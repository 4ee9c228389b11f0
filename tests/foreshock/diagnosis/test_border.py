"""Tests of the detectors' border: extreme values are named and change nothing else, one that raises stops."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance, stop
from foreshock.diagnosis.quantities import LEARNING_RATE_KEY, LENGTH_KEY, REWARD_KEY
from tests.foreshock.diagnosis.curves import closed_steps, fired, watch

CONFIGURATION = WarningConfiguration()
EXTREMES = (1e300, -1e300, 1e30, 5e-324, 1e-300, -1.0, 0.0, math.inf, -math.inf, math.nan)
KEYS = sorted(CONFIGURATION.keys)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(KEYS), st.sampled_from(EXTREMES) | st.floats(), max_size=8),
        min_size=1,
        max_size=40,
    )
)
def test_no_float_stops_the_detectors(rows: list[dict[str, float]]) -> None:
    state = WarningState()
    for step, values in enumerate(rows):
        state, events = advance(state, ClosedStep(step, values), CONFIGURATION)
        for event in events:
            json.dumps([event.value, event.threshold, dict(event.evidence)], allow_nan=False)
    assert WarningState.from_bytes(state.to_bytes()) == state


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (REWARD_KEY, 1e300),
        (REWARD_KEY, math.inf),
        (LENGTH_KEY, -3.0),
        (LEARNING_RATE_KEY, -1e-6),
        ("scalars:grad_norm", math.nan),
    ],
)
def test_extreme_value_is_named_once_and_clears(key: str, value: float) -> None:
    _, events = watch(closed_steps({key: [1.0, value, value, *[1.0] * 6]}))
    (found, cleared) = (event for event in events if event.rule == "value_refused")
    assert (found.step, found.evidence["key"], found.evidence["logged"]) == (2, key, f"{value:g}")
    assert (cleared.change, cleared.fired_step, cleared.step) == ("cleared", 2, 8)


def test_extreme_value_changes_nothing_else() -> None:
    rewards = [0.5, 0.52, 0.48, 0.51] * 10
    usual, _ = watch(closed_steps({REWARD_KEY: rewards}, range(40)))
    steps = closed_steps({REWARD_KEY: rewards}, range(40))
    steps.insert(20, ClosedStep(19, {REWARD_KEY: 1e300}))
    shifted = [ClosedStep(number, each.values) for number, each in enumerate(steps)]
    state, events = watch(shifted)
    assert fired(events) == [("value_refused", 20)]
    assert state.reward.values == usual.reward.values


def test_missing_value_is_not_named() -> None:
    _, events = watch([ClosedStep(0, {REWARD_KEY: math.nan})])
    assert events == []


def test_stopped_detection_says_so_and_detects_nothing_more() -> None:
    state, (event,) = stop(WarningState(), 3, ZeroDivisionError("division by zero"))
    assert (event.rule, event.severity) == ("detection_stopped", "warning")
    assert event.why.startswith("Detection stopped at step 3: ZeroDivisionError: division by zero.")
    assert WarningState.from_bytes(state.to_bytes()) == state
    state, events = advance(state, ClosedStep(4, {REWARD_KEY: 1e300}), CONFIGURATION)
    assert (state.step, events) == (4, ())
