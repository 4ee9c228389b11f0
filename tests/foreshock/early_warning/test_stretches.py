"""Tests of the detectors over stretches: states and events are those of one step after the other, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.early_warning.default_rules import K3, default_rules
from foreshock.early_warning.detectors import (
    LEARNING_RATE_KEY,
    LENGTH_KEY,
    LONGEST_KEY,
    REWARD_KEY,
    TRUNCATED_KEY,
    ClosedStep,
    RulesFromStep,
    WarningConfiguration,
    WarningState,
    advance,
)
from foreshock.early_warning.events import Event
from foreshock.early_warning.pooling import Pooling, add_evidence, log_evidence
from foreshock.early_warning.rules import LAG_KEY
from foreshock.early_warning.stretches import ClosedSteps, advance_over
from foreshock.early_warning.stretches import rules as rules_of_stretches
from foreshock.early_warning.stretches import surge as surge_of_stretches
from foreshock.early_warning.stretches.evidence import evidence_over

CONFIGURATION = WarningConfiguration()
# From step 40 on another set of rules, some of which may be firing then.
CHANGED = WarningConfiguration(changed_rules=(RulesFromStep(40, default_rules()[::2]),))
NUMBERS = st.one_of(st.floats(1e-8, 1e4), st.just(0.0), st.just(math.nan), st.just(math.inf), st.just(-1.0))
ROWS = st.lists(st.dictionaries(st.sampled_from(CONFIGURATION.keys), NUMBERS), min_size=1, max_size=80)


def assert_equal_over(steps: Sequence[ClosedStep], size: int, configuration: WarningConfiguration) -> None:
    """Compare stretches of `size` steps with single steps."""
    columns, state = ClosedSteps.of(steps), WarningState()
    over, events, found = WarningState(), list[Event](), list[Event]()
    for first in range(0, len(steps), size):
        for closed in steps[first : first + size]:
            state, new = advance(state, closed, configuration)
            events += new
        over, of_stretch = advance_over(over, columns.part(first, first + size), configuration)
        found += of_stretch
        assert over.to_bytes() == state.to_bytes()
        assert over == state
    assert [event.to_json() for event in found] == [event.to_json() for event in events]


@settings(deadline=None, max_examples=60)
@given(ROWS, st.lists(st.integers(0, 9), max_size=4), st.integers(8, 40), st.booleans())
def test_any_values_give_the_states_and_events_of_single_steps(
    rows: list[dict[str, float]], gaps: list[int], size: int, changed: bool
) -> None:
    steps, step = [], 0
    for index, row in enumerate(rows):
        step += 1 + (gaps[index % len(gaps)] if gaps else 0)
        steps.append(ClosedStep(step, row, rebaseline=index % 37 == 31))
    # Short enough that rules are looked at in halves.
    with patch.object(rules_of_stretches, "FEW_STEPS", 5):
        assert_equal_over(steps, size, CHANGED if changed else CONFIGURATION)


def history(seed: int, count: int = 500) -> list[ClosedStep]:
    """Return a history of all quantities: noise of several sizes, missing values, spikes, changes of their level."""
    random = np.random.default_rng(seed)
    series: dict[str, NDArray[np.float64]] = {}
    for key in CONFIGURATION.keys:
        kind = random.integers(6)
        level = np.where(np.arange(count) > count * random.random(), 1.5 * random.normal(), 0.0)
        noise = (0.05, 0.3, 1.0)[random.integers(3)] * random.normal(size=count)
        values = 10.0 ** random.integers(-5, 2) * np.exp(noise + level)
        if kind == 1:
            values[random.random(count) < 0.3] = np.nan
        elif kind == 2:
            values *= 0.0
        elif kind == 3:
            values[random.random(count) < 0.02] *= 50.0
        if kind:
            series[key] = values
    rise = np.where(np.arange(count) > count * random.random(), random.normal(), 0.0)
    series[LENGTH_KEY] = 800.0 * np.exp((0.05, 0.2)[seed % 2] * random.normal(size=count) + rise)
    lags = random.integers(0, 1 + seed % 3, size=count).astype(np.float64)
    series[LAG_KEY] = lags
    if seed % 2:
        series.pop(TRUNCATED_KEY, None)
        series.pop(LONGEST_KEY, None)
    numbers = np.cumsum(1 + (random.random(count) < 0.1 * (seed % 2)) * random.integers(0, 9, size=count))
    return [
        ClosedStep(int(step), {key: float(values[index]) for key, values in series.items()})
        for index, step in enumerate(numbers)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_histories_with_alerts_give_the_states_and_events_of_single_steps(seed: int) -> None:
    assert_equal_over(history(seed), 60 + 50 * seed, CONFIGURATION)


def healthy(count: int) -> list[ClosedStep]:
    """Return a healthy run: lengths below a cap that some responses reach, a reward that is learned, a small k3."""
    random = np.random.default_rng(3)
    noise = random.normal(size=(5, count))
    series = {
        LENGTH_KEY: 1000.0 * np.exp(0.1 * noise[0]),
        LONGEST_KEY: np.full(count, 4000.0),
        TRUNCATED_KEY: np.where(noise[1] > 0.0, 0.02, 0.0),
        REWARD_KEY: 0.8 - 0.5 * np.exp(-np.arange(count) / 1e3) + 0.02 * noise[2],
        K3: 1e-4 * np.exp(0.3 * noise[3]),
        "trainer/rollout:surprisal_z": noise[4],
        LEARNING_RATE_KEY: np.full(count, 1e-6),
    }
    return [
        ClosedStep(index + 1, {key: float(values[index]) for key, values in series.items()}) for index in range(count)
    ]


def test_healthy_steps_are_not_advanced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = healthy(1_200)
    state = WarningState()
    for closed in steps[:200]:
        state, _ = advance(state, closed, CONFIGURATION)
    expected = state
    for closed in steps[200:]:
        expected, events = advance(expected, closed, CONFIGURATION)
        assert events == ()

    def unexpected(*_: object) -> None:
        raise AssertionError("a healthy stretch was advanced step by step")

    monkeypatch.setattr(rules_of_stretches, "advance_each", unexpected)
    monkeypatch.setattr(surge_of_stretches, "advance_surge", unexpected)
    found, events_found = advance_over(state, ClosedSteps.of(steps[200:]), CONFIGURATION)
    assert found.to_bytes() == expected.to_bytes()
    assert events_found == []


def test_steps_that_do_not_ascend_are_refused() -> None:
    columns = ClosedSteps(np.array([1, 3, 3]), {})
    with pytest.raises(ValueError, match="steps must ascend"):
        advance_over(WarningState(), columns, CONFIGURATION)
    state, _ = advance(WarningState(), ClosedStep(5, {}), CONFIGURATION)
    with pytest.raises(ValueError, match="steps must ascend"):
        advance_over(state, ClosedSteps(np.arange(5, 30), {}), CONFIGURATION)


@pytest.mark.parametrize("pooling", ["mean", "deviation"])
@pytest.mark.parametrize("scale", [0.05, 0.5, 0.95])
def test_evidence_of_many_values_is_that_of_one_after_the_other(pooling: Pooling, scale: float) -> None:
    random = np.random.default_rng(5)
    values = scale * (random.normal(size=2_000) if pooling == "deviation" else random.uniform(0.5, 1.05, size=2_000))
    thresholds = np.ones(2_000)
    expected: tuple[float, ...] = ()
    for value in values.tolist():
        expected = add_evidence(expected, pooling, value, 1.0)
    assert evidence_over((), pooling, values, thresholds, np.abs(values) > 1.0) == expected


def test_evidence_that_is_enough_is_left_to_single_steps() -> None:
    values, thresholds = np.full(100, 2.0), np.ones(100)
    logs: tuple[float, ...] = ()
    enough = 0
    for value in values.tolist():
        logs = add_evidence(logs, "mean", value, 1.0)
        enough += log_evidence(logs) >= math.log(10_000)
    assert enough > 50
    assert evidence_over((), "mean", values, thresholds, values > 1.0) is None
    # Values below the threshold do not fire, however much evidence there is.
    assert evidence_over(logs, "mean", values / 4, thresholds, np.zeros(100, dtype=np.bool_)) is not None
