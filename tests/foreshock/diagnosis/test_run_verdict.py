"""The verdict on a run: the fall of its reward and its alerts outrank a healthy mismatch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import pytest

from foreshock.diagnosis.health import Health
from foreshock.diagnosis.run_verdict import (
    LEAST_VALUES,
    RunSignals,
    StandingAlert,
    SteppedValues,
    conclude_run,
    reward_fall,
)
from tests.foreshock.batches import recorded_run

QUIET = Health("healthy", (), ("Healthy: k3 of trainer/rollout is 5.0e-4.",))
NONE = SteppedValues((), ())


def recorded(run: str, names: Sequence[str]) -> list[SteppedValues]:
    metrics = recorded_run(run).parent / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [SteppedValues([row["step"] for row in rows], [row[name] for row in rows]) for name in names]


def signals_of(run: str) -> RunSignals:
    reward, length, k3 = recorded(run, ("reward", "response_length", "k3"))
    return RunSignals(reward, length, k3)


def test_collapsed_run_is_critical_since_its_reward_fell() -> None:
    found = conclude_run(QUIET, signals_of("collapsed"))
    assert (found.verdict, found.since, found.mismatch) == ("critical", 10, "healthy")
    assert found.headline.startswith("Critical since step 10: the reward fell from 0.20 to 0, and the responses shrank")
    assert "in its healthy range: look at the learning rate and the data" in found.headline
    assert found.sentences == ("Mismatch healthy: k3 of trainer/rollout is 5.0e-4.",)


def test_run_that_learns_keeps_the_verdict_on_its_mismatch() -> None:
    found = conclude_run(QUIET, signals_of("healthy"))
    assert (found.verdict, found.since, found.fall) == ("healthy", None, None)
    assert found.headline == "Healthy: k3 of trainer/rollout is 5.0e-4. Reward 0.99, no collapse."


@pytest.mark.parametrize("values", [25, 60, 120])
def test_fall_is_seen_at_the_same_step_as_the_run_goes_on(values: int) -> None:
    (reward,) = recorded("collapsed", ("reward",))
    fall = reward_fall(SteppedValues(reward.steps[:values], reward.values[:values]))
    assert fall is not None
    assert fall.since == 10


def test_sudden_fall_begins_at_its_first_low_step() -> None:
    values = [0.8 + 0.01 * (at % 3) for at in range(11)] + [0.05 + 0.01 * (at % 3) for at in range(15)]
    fall = reward_fall(SteppedValues(range(1, 27), values))
    assert fall is not None
    assert fall.since == 12


def test_reward_that_came_back_has_not_fallen() -> None:
    (reward,) = recorded("collapsed", ("reward",))
    values = [*reward.values, *[0.3] * 10]
    assert reward_fall(SteppedValues(range(len(values)), values)) is None


@pytest.mark.parametrize(("correlation", "level", "deviation"), [(0.0, 0.1, 0.1), (0.5, 0.1, 0.1), (0.9, 0.3, 0.1)])
def test_noise_is_no_fall(correlation: float, level: float, deviation: float) -> None:
    chance, claims = random.Random(7), 0
    for _ in range(40):
        noise, values = 0.0, []
        for _ in range(300):
            noise = correlation * noise + math.sqrt(1 - correlation**2) * chance.gauss(0.0, 1.0)
            values.append(max(0.0, level + deviation * noise))
        claims += reward_fall(SteppedValues(range(300), values)) is not None
    assert claims == 0


def test_too_few_rewards_make_no_claim() -> None:
    short = SteppedValues(range(LEAST_VALUES - 1), [1.0] * 5 + [0.0] * (LEAST_VALUES - 6))
    assert reward_fall(short) is None
    assert "no collapse" not in conclude_run(QUIET, RunSignals(short, NONE, NONE)).headline


def test_open_alert_outranks_a_healthy_mismatch_and_names_its_step() -> None:
    alerts = [
        StandingAlert("length ramp", "info", 3, "A ramp."),
        StandingAlert("gradient norm", "warning", 9, "The norm has tripled."),
        StandingAlert("length surge", "critical", 41, "The lengths have surged."),
    ]
    found = conclude_run(QUIET, RunSignals(NONE, NONE, NONE), alerts)
    assert (found.verdict, found.since) == ("critical", 41)
    assert found.headline == ("Critical since step 41: length surge. The lengths have surged. 1 more alert below.")
    assert conclude_run(QUIET, RunSignals(NONE, NONE, NONE), alerts[:1]).verdict == "healthy"


def test_mismatch_beyond_its_range_says_since_when_if_an_alert_does() -> None:
    ill = Health("warning", (), ("Warning: k3 of trainer/rollout is 5.0e-3.",))
    alert = StandingAlert("k3 high", "warning", 12, "k3 is high.")
    assert conclude_run(ill, RunSignals(NONE, NONE, NONE), [alert]).headline.startswith("Warning since step 12: k3 of")
    assert conclude_run(ill, RunSignals(NONE, NONE, NONE)).since is None


def test_alert_of_something_else_does_not_date_the_mismatch() -> None:
    ill = Health("warning", (), ("Warning: k3 of trainer/rollout is 5.0e-3.",))
    alert = StandingAlert("incomplete step", "warning", 30, "A shard is missing.", of_mismatch=False)
    found = conclude_run(ill, RunSignals(NONE, NONE, NONE), [alert])
    assert (found.since, found.headline) == (None, "Warning: k3 of trainer/rollout is 5.0e-3.")


def test_run_without_log_probs_says_what_to_log() -> None:
    found = conclude_run(None, RunSignals(NONE, NONE, NONE))
    assert (found.verdict, found.headline) == ("unknown", "Mismatch not measured.")
    assert "log both" in found.sentences[0]
