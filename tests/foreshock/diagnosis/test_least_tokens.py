"""The least tokens of a rule: steps of so many healthy tokens are seldom beyond its threshold by chance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.least_tokens import LEAST_TOKENS
from foreshock.measures.registry import measure_named
from foreshock.rollouts.rollout_files import read_rollout_file
from tests.foreshock.batches import recorded_run

Float64 = NDArray[np.float64]
LOCKED = range(81, 161)


def test_every_rule_on_a_mean_over_tokens_has_its_number() -> None:
    for rule in default_rules():
        if ":" not in rule.key or rule.key.startswith("scalars:"):
            continue
        measure = measure_named(rule.measure_name)
        of_tokens = measure.kind != "step" or measure.aggregation == "token mean"
        exempt = {"scores_identical", "lag_high", "mismatch_above_noise_floor"}
        if of_tokens and rule.name not in exempt:
            assert rule.least_tokens == LEAST_TOKENS[rule.measure_name] > 0, rule.name


@pytest.fixture(scope="module")
def tokens() -> tuple[Float64, Float64]:
    """Return d and log μ of all tokens of the locked steps."""
    folder = recorded_run("healthy")
    batches = [read_rollout_file(folder / f"step_{step:04d}.jsonl.gz") for step in LOCKED]
    columns = [(each.trainer_log_probs, each.rollout_log_probs, each.generated) for each in batches]
    target, behaviour = (
        np.concatenate([np.asarray(column[place])[column[2]] for column in columns]).astype(np.float64)
        for place in (0, 1)
    )
    return target - behaviour, behaviour


def k3(d: Float64, _: Float64) -> Float64:
    return np.expm1(d) - d


# Terms of a token, and whether a mean over tokens is beyond the rule's threshold; of rises, at the level of the run.
CASES: dict[str, tuple[Callable[[Float64, Float64], Float64], Callable[[Float64, float], NDArray[np.bool_]]]] = {
    "k3_kl": (k3, lambda means, level: means > max(1e-4, 5 * level)),
    "chi2_token": (lambda d, _: np.expm1(d) ** 2, lambda means, _: means > 5e-3),
    "low_probability_abs_d": (
        lambda d, log_mu: np.abs(d[log_mu < math.log(0.1)]),
        lambda means, level: means > max(math.sqrt(2e-3), 2.5 * level),
    ),
    "mean_abs_d": (lambda d, _: np.abs(d), lambda means, _: means > 0.05),
    "tail_2": (lambda d, _: (np.abs(d) > math.log(2)).astype(np.float64), lambda means, _: means > 0.1),
    "mean_ratio": (lambda d, _: np.exp(d), lambda means, _: np.abs(means - 1) > 0.02),
    "training_ppl": (lambda d, log_mu: -(log_mu + d), lambda means, level: means > level + math.log(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_fewer_than_one_in_a_hundred_healthy_steps_is_beyond_by_chance(
    name: str, tokens: tuple[Float64, Float64]
) -> None:
    terms_of, is_beyond = CASES[name]
    terms = terms_of(*tokens)
    drawn = terms[np.random.default_rng(0).integers(0, terms.size, (4000, LEAST_TOKENS[name]))].mean(axis=1)
    assert is_beyond(drawn, float(terms.mean())).mean() < 0.01
