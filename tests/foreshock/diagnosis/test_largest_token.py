"""Rules judge a step without its largest token; values without extremes stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.lags import K3_KEYS, LAG_KEY, TOKENS_KEYS
from foreshock.diagnosis.largest_token import without_largest_token
from foreshock.measures import compare
from foreshock.model_kind import ModelKind
from foreshock.rollouts import RolloutBatch
from tests.foreshock.diagnosis.curves import fired, watch

PLAIN = {"k3_kl": "k3", "chi2_token": "chi2", "reverse_chi2_token": "reverse", "mean_ratio": "ratio"}


def values_of(d: np.ndarray, entropy: float = 1.0) -> dict[str, float]:
    """Return the measures of one step by `comparison:measure`, as the service stores them; 32 prompts."""
    # A log-prob is never above 0, so that a token with a large d is unlikely under μ.
    mu = np.where(d > 1.5, -40.0, -2.0)
    rows = np.array_split(np.arange(d.size), 32)
    batch = RolloutBatch.from_lists(
        [str(row) for row in range(32)], [[1]] * 32, [[2] * row.size for row in rows],
        entropy=[np.full(row.size, entropy, np.float32) for row in rows],
        rollout_log_probs=[mu[row].astype(np.float32) for row in rows],
    )  # fmt: skip
    assert batch.rollout_log_probs is not None
    measures = compare(batch, mu + d, batch.rollout_log_probs).measures()
    found = {f"{TRAINER_ROLLOUT}:{name}": value for name, value in measures.items() if np.isfinite(value)}
    return found | {"rollout:num_tokens": float(d.size)}


def terms(d: np.ndarray) -> dict[str, np.ndarray]:
    ratio = np.exp(d)
    return {"k3": ratio - 1 - d, "chi2": (ratio - 1) ** 2, "reverse": (1 - ratio) ** 2 / ratio, "ratio": ratio}


@given(
    st.lists(st.floats(-3.0, 3.0), min_size=40, max_size=60),
    st.floats(-9.0, 9.0),
)
def test_means_are_those_of_all_other_tokens(others: list[float], wild: float) -> None:
    d = np.array([*others, wild])
    found = without_largest_token(values_of(d))
    for measure, name in PLAIN.items():
        term = terms(d)[name]
        assert found[f"{TRAINER_ROLLOUT}:{measure}"] == pytest.approx(
            (term.sum() - term.max()) / (d.size - 1), rel=1e-6, abs=1e-8
        )
    rest = np.delete(np.exp(d), np.argmax(d))
    expected = rest.sum() ** 2 / (rest.size * (rest**2).sum())
    assert found[f"{TRAINER_ROLLOUT}:ess_token"] == pytest.approx(expected, rel=1e-6)


def test_what_rounding_hides_is_not_judged() -> None:
    huge = np.exp(60.0)
    means = {"tokens": 1000.0, "min_d": 0.0, "max_d": 60.0, "k3_kl": huge / 1000, "mean_ratio": huge / 1000,
             "ess_token": 1e-3, "mean_abs_d": 0.06}  # fmt: skip
    found = without_largest_token({f"{TRAINER_ROLLOUT}:{name}": value for name, value in means.items()})
    judged = {key.partition(":")[2] for key in found}
    assert judged == {"tokens", "min_d", "max_d", "mean_abs_d"}


def test_a_k3_that_the_trainer_reports_stays_as_it_is() -> None:
    reported = {f"{TRAINER_ROLLOUT}:k3_kl": 0.1}
    assert without_largest_token(reported) == reported


def run_of(steps: int, d_of: Callable[[int], np.ndarray], model_kind: ModelKind | None = None) -> list[tuple[str, int]]:
    """Return the rules that fire over steps whose d is drawn anew, with severity above info."""
    configuration = WarningConfiguration.for_model(model_kind)
    closed = [ClosedStep(step, values_of(d_of(step))) for step in range(1, steps + 1)]
    _, events = watch(closed, configuration)
    grave = [each for each in events if each.severity != "info"]
    return fired(grave)


@pytest.mark.parametrize("wild", [7.2, -7.2, 15.0, -30.0])
def test_one_wild_token_a_step_fires_nothing(wild: float) -> None:
    random = np.random.default_rng(3)

    def step(_: int) -> np.ndarray:
        d = random.normal(0, 0.01, 12_800)
        d[random.integers(d.size)] = wild
        return d

    assert run_of(40, step) == []


@pytest.mark.parametrize("lag", ["0", "1"])
def test_one_wild_token_fires_nothing_at_any_lag(lag: str) -> None:
    random, closed = np.random.default_rng(3), []
    for step in range(1, 41):
        d = random.normal(0, 0.01, 12_800)
        d[int(lag) * 6400] = -7.2
        values = values_of(d)
        k3 = terms(d)["k3"]
        for place, key in enumerate(("0", "1")):
            values[TOKENS_KEYS[key]], values[K3_KEYS[key]] = 6400.0, k3[place * 6400 :][:6400].mean()
        assert values[K3_KEYS[lag]] > 1e-3 > without_largest_token(values)[K3_KEYS[lag]]
        closed.append(ClosedStep(step, values | {LAG_KEY: 0.5}))
    _, events = watch(closed)
    assert [each for each in events if each.severity != "info"] == []


def test_many_wild_tokens_fire() -> None:
    random = np.random.default_rng(3)

    def step(_: int) -> np.ndarray:
        d = random.normal(0, 0.01, 12_800)
        d[random.integers(d.size, size=40)] = -7.2
        return d

    assert {"mismatch_warning", "mismatch_critical"} <= {rule for rule, _ in run_of(20, step)}


@pytest.mark.parametrize(("kind", "k3"), [("dense", 8e-4), ("moe", 8e-3)])
@pytest.mark.parametrize("shape", ["gaussian", "t4"])
def test_a_mismatch_inside_the_range_of_k3_is_inside_all_ranges(kind: ModelKind, k3: float, shape: str) -> None:
    random = np.random.default_rng(5)

    def step(_: int) -> np.ndarray:
        sigma = np.sqrt(2 * k3)
        if shape == "gaussian":
            return random.normal(-(sigma**2) / 2, sigma, 12_800)
        # Student's t with 4 degrees of freedom has variance 2.
        return np.asarray(random.standard_t(4, 12_800) * sigma / np.sqrt(2))

    assert run_of(40, step, kind) == []
