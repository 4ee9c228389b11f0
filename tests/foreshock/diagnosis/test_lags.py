"""Numerics and staleness apart: k3 is judged at lag 0, and every other lag against its own baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, SteppedValues
from foreshock.diagnosis.lags import K3_KEYS, LAG_KEY, LAGS, TOKENS_KEYS, StepLags, lags_in_words
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.diagnosis.mismatch_rules import K3, K3_PER_ENTROPY
from foreshock.diagnosis.rule import Event
from tests.foreshock.diagnosis.curves import fired, noisy, watch

Tokens = Mapping[str, int]


def mixed(k3: Mapping[str, float], tokens: Tokens, entropy: float = 0.5) -> dict[str, float]:
    """Return the values of a step whose tokens are at these lags."""
    whole = sum(tokens.values())
    mean = sum(k3[lag] * count for lag, count in tokens.items()) / whole
    lag_mean = sum(int(lag) * count for lag, count in tokens.items()) / whole
    values = {K3: mean, K3_PER_ENTROPY: mean / entropy, LAG_KEY: lag_mean, "trainer/rollout:tokens": whole}
    values |= {TOKENS_KEYS[lag]: tokens.get(lag, 0) for lag in LAGS}
    return values | {K3_KEYS[lag]: k3[lag] for lag in tokens}


def events_of(steps: Sequence[Mapping[str, float]]) -> list[Event]:
    return watch([ClosedStep(number, values) for number, values in enumerate(steps, start=1)])[1]


# A mean lag of 0.68, as in a public run.
PUBLISHED = {"0": 3200, "1": 6800}


def test_a_large_k3_at_a_mean_lag_above_a_half_is_critical() -> None:
    events = events_of([mixed({"0": 0.5, "1": 0.5}, PUBLISHED)] * 30)
    (critical,) = [event for event in events if event.rule == "mismatch_critical"]
    assert critical.value == pytest.approx(0.5)
    assert critical.why.startswith("At lag 0 (32 % of the tokens), the mismatch (k3) is above 0.01 nats per token")
    assert (critical.evidence["lag"], critical.evidence["tokens"]) == (0, 3200)


def test_a_healthy_lag_zero_under_a_stale_mean_raises_nothing() -> None:
    # k3 is 0.045 over all tokens.
    assert events_of([mixed({"0": 5e-4, "1": 0.1}, {"0": 5500, "1": 4500})] * 60) == []


def test_another_mix_of_lags_is_no_rise() -> None:
    levels = {"0": 5e-4, "1": 5e-3, "2": 5e-2}
    before, after = {"0": 9500, "1": 300, "2": 200}, {"0": 1500, "1": 500, "2": 8000}
    assert events_of([mixed(levels, before)] * 30 + [mixed(levels, after)] * 60) == []


def test_a_rise_at_one_lag_is_found_below_the_mean_and_told_apart() -> None:
    calm, risen = {"0": 5e-4, "1": 5e-3, "2": 5e-2}, {"0": 5e-4, "1": 5e-2, "2": 0.5}
    tokens = {"0": 5000, "1": 3000, "2": 2000}
    events = events_of([mixed(calm, tokens)] * 30 + [mixed(risen, tokens)] * 30)
    (rise,) = [event for event in events if event.rule == "mismatch_rise"]
    assert rise.why.startswith("At lags 1 to 2 (50 % of the tokens), the mismatch (k3) has risen")
    assert rise.why.endswith("At lag 0 it is 5.0e-4.")
    assert rise.evidence["times_baseline"] == pytest.approx(10.0)
    assert not any(event.rule == "mismatch_critical" for event in events)


def test_a_rise_at_lag_zero_is_found_beneath_larger_staleness() -> None:
    tokens = {"0": 2000, "4": 8000}
    calm, risen = mixed({"0": 5e-4, "4": 0.3}, tokens), mixed({"0": 6e-3, "4": 0.3}, tokens)
    rules = dict(fired(events_of([calm] * 30 + [risen] * 30)))
    assert {"mismatch_rise", "mismatch_warning"} <= set(rules)
    assert rules["mismatch_rise"] < 45
    assert "mismatch_critical" not in rules


@pytest.mark.parametrize(("at_zero", "fires"), [(LEAST_TOKENS["k3_kl"] - 1, False), (LEAST_TOKENS["k3_kl"], True)])
def test_few_tokens_at_lag_zero_are_not_judged(at_zero: int, fires: bool) -> None:
    events = events_of([mixed({"0": 0.5, "1": 0.5}, {"0": at_zero, "1": 5000})] * 30)
    assert any(event.rule == "mismatch_critical" for event in events) == fires


def test_ranges_of_whole_steps_hold_only_if_nearly_all_tokens_are_at_lag_zero() -> None:
    heavy = {"trainer/rollout:chi2_token": 0.5}
    for stale, fires in ((50, True), (2000, False)):
        step = mixed({"0": 5e-4, "1": 0.1}, {"0": 10_000 - stale, "1": stale})
        assert ("chi2_high" in dict(fired(events_of([step | heavy] * 30)))) == fires


def test_the_control_loop_reads_numerics_at_lag_zero_of_mixed_steps() -> None:
    steps = [ClosedStep(number, mixed({"0": 5e-4, "1": 0.02}, PUBLISHED)) for number in range(1, 20)]
    loop = watch(steps)[0].loop
    assert loop.measured_static
    assert loop.static == pytest.approx(5e-4)
    few = [ClosedStep(number, mixed({"0": 5e-4, "1": 0.02}, {"0": 20, "1": 5000})) for number in range(1, 20)]
    assert not watch(few)[0].loop.measured_static


def history(steps: Sequence[Mapping[str, float]], **values: Any) -> History:
    numbers = list(range(1, len(steps) + 1))
    plain = History(
        observed_step=numbers[-1],
        newest_step=numbers[-1],
        k3=SteppedValues(numbers, [step[K3] for step in steps]),
        tokens=[int(step["trainer/rollout:tokens"]) for step in steps],
        lags=[StepLags.of(step) for step in steps],
    )
    return dataclasses.replace(plain, **values)


def test_the_headline_tells_numerics_and_staleness_apart() -> None:
    found = diagnose(history([mixed({"0": 5e-4, "1": 0.02, "2": 0.09}, {"0": 3200, "1": 3800, "2": 3000})] * 20))
    assert found.headline == (
        "Healthy: at lag 0 the mismatch (k3) is 5.0e-4 in the newest 10 measured steps; the mean of all tokens is "
        "3.5e-2, with 68 % of them at lags 1 to 2."
    )


def test_without_tokens_at_lag_zero_a_large_k3_is_not_healthy() -> None:
    stale = history([mixed({"1": 0.05, "2": 0.15, "3": 0.31}, {"1": 400, "2": 400, "3": 400})] * 6)
    found = diagnose(stale)
    assert found.verdict == "unknown"
    assert found.headline == (
        "Unknown: the mismatch (k3) is 0.17 and no token is at lag 0, so that numerics cannot be told from "
        "staleness: it is 5.0e-2 at lag 1, 0.15 at lag 2."
    )
    assert found.missing[0].sentence.endswith("5.0e-2 at lag 1, 0.15 at lag 2, 0.31 at lag 3")
    assert "newest weights" in found.missing[0].what_to_do
    # Within the range of lag 0 at a lag of 1: staleness only adds to numerics.
    assert diagnose(history([mixed({"1": 5e-4}, {"1": 2000})] * 20)).verdict == "healthy"


def test_a_restart_that_changes_the_lags_is_no_change_of_numerics() -> None:
    # A public run: at a restart k3 over all tokens fell by 41 %, that at lag 0 rose by 4 %.
    noise = noisy(np.ones(60), 0.03)
    levels = {"0": 3.2e-3, "1": 8e-3, "4": 2.2e-2}
    tokens = [{"0": 3200, "1": 2600, "4": 4200}] * 30 + [{"0": 5400, "1": 3300, "4": 1300}] * 30
    scale = [1.0] * 30 + [1.04] * 30
    steps = [
        mixed({lag: k3 * each * (rise if lag == "0" else 1.0) for lag, k3 in levels.items()}, of_step)
        for each, rise, of_step in zip(noise, scale, tokens, strict=True)
    ]
    overall = [step[K3] for step in steps]
    assert np.median(overall[30:]) / np.median(overall[:30]) == pytest.approx(0.59, abs=0.03)
    found = diagnose(history(steps, model_kind="moe"))
    assert [cause.name for cause in found.causes] == []
    # The same course of all tokens, without lags, is a jump.
    assert [cause.name for cause in diagnose(history(steps, lags=())).causes] == ["mismatch_jump"]


def test_a_jump_at_lag_zero_is_told_at_lag_zero() -> None:
    noise, tokens = noisy(np.ones(60), 0.03), {"0": 5000, "3": 5000}
    steps = [mixed({"0": 5e-4 * each * (1 if place < 30 else 2), "3": 0.1}, tokens) for place, each in enumerate(noise)]
    (cause,) = diagnose(history(steps)).causes
    assert cause.name == "mismatch_jump"
    assert cause.sentence.startswith("k3 at lag 0 rose from 5.0e-4 to 1.0e-3 (× 2.0) in one step, at step 31")


def test_without_versions_the_step_is_judged_as_a_whole() -> None:
    whole = {K3: 0.5, "trainer/rollout:tokens": 5000.0, **dict.fromkeys(TOKENS_KEYS.values(), 0.0)}
    assert "mismatch_critical" in dict(fired(events_of([whole] * 30)))
    found = diagnose(history([{**whole, K3: 5e-4}] * 20))
    assert found.headline.startswith("Healthy: the mismatch (k3) is 5.0e-4 in the newest 10 measured steps")


@pytest.mark.parametrize(
    ("lags", "words"),
    [(["0"], "lag 0"), (["1", "2"], "lags 1 to 2"), (["5-8"], "lags 5 to 8"), (["1", "9-16"], "lags 1 to 16"),
     (["2", "17+"], "lags 2 and more"), (["17+"], "lags 17 and more")],
)  # fmt: skip
def test_lags_in_words(lags: list[str], words: str) -> None:
    assert lags_in_words(lags) == words
