"""What the course of k3 tells: jumps with their date, growth since the first step, static mismatch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshock.diagnosis.course import causes_of_course, grows_from_start
from tests.foreshock.diagnosis.curves import noisy


def names(values: np.ndarray, first: int = 1, named: tuple[str, ...] = ()) -> dict[str, str]:
    found = causes_of_course(range(first, first + values.size), values.tolist(), named)
    return {each.name: each.sentence for each in found}


@pytest.mark.parametrize("times", [1.8, 3.0, 1 / 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_jump_has_its_date(times: float, seed: int) -> None:
    values = noisy(np.where(np.arange(1, 65) < 41, 3e-3, 3e-3 * times), seed=seed)
    assert "at step 41" in names(values)["mismatch_jump"]


def test_a_jump_that_goes_on_rising_is_told_apart_from_a_level() -> None:
    flat = np.where(np.arange(1, 41) < 21, 2e-4, 2e-2)
    assert "with no drift before or after" in names(noisy(flat))["mismatch_jump"]
    rising = np.where(np.arange(1, 41) < 21, 1.0, np.linspace(0, 2, 40)) * flat
    assert "at step 21, and has risen since, to 3." in names(noisy(rising))["mismatch_jump"]


@pytest.mark.parametrize("seed", range(8))
def test_neither_a_ramp_nor_noise_nor_an_outlier_is_a_jump(seed: int) -> None:
    ramp = noisy(3e-3 * 2.5 ** (np.arange(64) / 64), seed=seed)
    flat = noisy(np.full(64, 3e-3), 0.25, seed)
    outlier = noisy(np.full(64, 3e-3), seed=seed)
    outlier[30:32] *= 4
    level = np.zeros(64)
    for at in range(1, 64):
        level[at] = 0.9 * level[at - 1] + np.random.default_rng(seed * 64 + at).normal(0, 0.1)
    for values in (ramp, flat, outlier, 3e-3 * np.exp(level)):
        assert "mismatch_jump" not in names(values, first=100)


def test_growth_from_the_first_step_looks_like_weights_that_do_not_arrive() -> None:
    grown = np.array([2.9e-4, 0.122, 0.325, 0.493, 0.645, 0.854, 1.02, 1.23])
    assert "still held the weights of step 1" in names(grown)["weights_not_delivered"]
    assert "weights_not_delivered" not in names(grown, first=5)
    assert "weights_not_delivered" not in names(grown, named=("shifted_log_probs",))
    assert "weights_not_delivered" not in names(np.array([2.9e-4, 3.1e-4, 2.8e-4, 3e-4, 0.01, 0.02]))


def test_the_growth_of_a_mixture_starts_at_its_own_healthy_level() -> None:
    grown = [1.5e-3 * 1.4**step for step in range(16)]
    (found,) = causes_of_course(range(1, 17), grown, (), 1e-2)
    assert found.name == "weights_not_delivered"


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_an_engine_that_stopped_to_get_weights_is_told_with_its_step(power: float) -> None:
    updates, dated = np.maximum(np.arange(64) - 30, 0), []
    for seed in range(20):
        kept = noisy(3e-4 + 0.06 * (updates / 34) ** power, 0.15, seed).tolist()
        found = {each.name: each for each in causes_of_course(range(101, 165), kept, ("mismatch_by_place",))}
        if cause := found.get("weights_not_delivered"):
            assert cause.title.startswith("no new weights in the engine since about step 13")
            dated.append(int(cause.evidence["step"]))
    assert len(dated) >= 18
    assert set(dated) <= set(range(131, 137))


def test_growth_that_feeds_itself_is_no_engine_that_stopped() -> None:
    """Exponential growth and a jump never; growth that saturates within a few steps, which is nearly alike, seldom."""
    updates = np.maximum(np.arange(64) - 30, 0)
    exponential = 3e-4 * np.exp(math.log(200.0) / 34 * updates)
    saturating = 3e-4 + 0.06 / (1.0 + np.exp(-(np.arange(64) - 50) / 3.0))
    for others, most in ((exponential, 0), (np.where(updates > 0, 0.02, 3e-4), 0), (saturating, 2)):
        told = [seed for seed in range(40) if "weights_not_delivered" in names(noisy(others, 0.15, seed), first=101)]
        assert len(told) <= most


@pytest.mark.parametrize("seed", range(5))
def test_growth_over_the_whole_run_is_told_from_a_level(seed: int) -> None:
    steps = range(1, 61)
    grown = noisy(4e-4 + 5e-2 * (np.arange(60) / 60) ** 2, 0.3, seed)
    assert grows_from_start(steps, grown)
    assert not grows_from_start(range(11, 71), grown)
    assert not grows_from_start(steps, grown[::-1])
    for level in (np.full(60, 5e-2), 4e-4 + 5e-2 * np.minimum(np.arange(60) / 8, 1.0)):
        assert not grows_from_start(steps, noisy(level, 0.3, seed))


@pytest.mark.parametrize("seed", range(5))
def test_growth_with_noise_is_told_and_a_lag_of_few_steps_is_not(seed: int) -> None:
    updates = np.arange(60) / 20
    grown = noisy(7e-5 + 5e-2 * updates**2 / (1 + updates**2), 0.1, seed)
    (found,) = causes_of_course(range(1, 61), grown.tolist(), ("temperatures_differ",))
    assert found.name == "weights_not_delivered"
    assert "at step 1 and grew from step to step, to" in found.sentence
    for lag in (1, 4, 8):
        delayed = noisy(7e-5 + 1e-2 * np.minimum(np.arange(60), lag) / lag, 0.1, seed)
        assert "weights_not_delivered" not in names(delayed)
    healthy = noisy(np.geomspace(5e-5, 8e-4, 60), 0.1, seed)
    assert "weights_not_delivered" not in names(healthy)


def test_growth_at_a_learning_rate_of_0_is_no_update_that_does_not_arrive() -> None:
    grown = [2e-4 * 1.3**step for step in range(16)]
    (found,) = causes_of_course(range(1, 17), grown, (), is_frozen=True)
    assert found.name == "mismatch_without_updates"
    assert "The logged learning rate is 0 in all steps" in found.sentence


@pytest.mark.parametrize("growth", [1.0, 1.6])
def test_a_mismatch_after_few_healthy_steps_is_dated_and_no_precision(growth: float) -> None:
    k3 = [3e-4, 4e-4, 2e-4, *(0.03 * growth**step for step in range(6))]
    (found,) = causes_of_course(range(1, 10), k3, ("mismatch_everywhere",))
    assert (found.name, found.certainty, found.evidence["step"]) == ("mismatch_began", "possible", 4)
    assert found.title == "weights of another step, or a change at step 4"
    assert "healthy up to step 3 (2.0e-4 to 4.0e-4)" in found.sentence
    # One healthy step is enough if it is the run's first one and k3 is twenty times as large since.
    (since,) = causes_of_course(range(1, 8), k3[2:], ())
    assert since.evidence["step"] == 2
    assert "the first update and its weight sync" in since.what_to_do
    # A ramp across the range, one healthy step of less contrast, or a cause that the lint names, is none.
    for values in (np.geomspace(2e-4, 2e-2, 20).tolist(), [6e-4, *(0.3 * each for each in k3[3:])]):
        others = causes_of_course(range(1, len(values) + 1), values, ())
        assert "mismatch_began" not in [each.name for each in others]
    assert not causes_of_course(range(1, 10), k3, ("shifted_log_probs",))


def test_mismatch_since_the_first_step_is_static() -> None:
    static = np.array([0.0597, 0.0606, 0.0568, 0.0536])
    assert "A quantised engine can make so much, or little dropout" in names(static)["static_mismatch"]
    # No quantisation and no dropout makes so much: the sentence names no cause.
    assert "larger than what quantised weights make" in names(10 * static)["static_mismatch"]
    assert names(static / 1000) == {}
    assert names(static, named=("processed_log_probs",)) == {}


def test_a_jump_between_steps_that_are_apart_is_dated_between_them() -> None:
    values = noisy(np.where(np.arange(40) < 20, 2e-4, 2e-3))
    (jump,) = causes_of_course(range(10, 410, 10), values.tolist(), ())
    assert "between steps 200 and 210" in jump.sentence
    assert "between steps 200 and 210" in jump.what_to_do


def test_growth_of_the_first_steps_is_told_as_long_as_it_is_there() -> None:
    first = dict(enumerate((3e-4 * 1.5 ** np.arange(16)).tolist(), start=1))
    steps, top = range(100, 164), first[16]
    (found,) = causes_of_course(steps, [top] * 64, (), first=first)
    assert found.name == "weights_not_delivered"
    assert "at step 16" in found.sentence
    assert causes_of_course(steps, [3e-4] * 64, (), first=first) == ()


def test_a_static_mismatch_names_the_steps_it_was_read_from() -> None:
    (found,) = causes_of_course(range(100, 164), [2e-2] * 64, (), first=dict.fromkeys(range(1, 17), 2.1e-2))
    assert "in the steps 1 to 16 and 100 to 163" in found.sentence


def wandering(random: np.random.Generator, correlation: float, steps: int) -> np.ndarray:
    """Return k3 about 3e-4 whose logs are correlated from step to step, with a standard deviation of 0.5."""
    logs = np.zeros(steps)
    for step in range(1, steps):
        logs[step] = correlation * logs[step - 1] + math.sqrt(1 - correlation**2) * random.normal(0, 0.5)
    return np.asarray(3e-4 * np.exp(logs))


@pytest.mark.parametrize("correlation", [0.9, 0.97])
def test_k3_that_wanders_has_no_jump(correlation: float) -> None:
    random = np.random.default_rng(11)
    jumps = 0
    for _ in range(40):
        k3 = wandering(random, correlation, 100)
        windows = [k3[max(0, end - 64) : end] for end in range(10, 101, 5)]
        found = [
            cause.name for each in windows for cause in causes_of_course(range(1, each.size + 1), each.tolist(), ("x",))
        ]
        jumps += "mismatch_jump" in found
    assert jumps <= 1


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_jump_is_found_in_k3_that_wanders(correlation: float) -> None:
    random = np.random.default_rng(12)
    found = 0
    for _ in range(20):
        k3 = wandering(random, correlation, 40) ** 0.3 * 3e-4**0.7
        k3[20:] *= 5.0
        found += "mismatch_jump" in [cause.name for cause in causes_of_course(range(1, 41), k3.tolist(), ("x",))]
    assert found >= 18


def test_few_values_of_a_constant_mismatch_may_spread_by_a_factor_of_two() -> None:
    assert "static_mismatch" in names(np.array([0.53, 0.8, 1.1, 0.7, 0.95, 0.62]))
    assert names(np.array([0.3, 0.8, 1.1, 0.7, 0.95, 0.62])) == {}
