"""Scorers divide logits by the temperature of the logged distribution and refuse truncated distributions."""

from __future__ import annotations

from typing import Any

import pytest

from foreshock.rollouts import BatchAttributes
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.sampling import divisors, sampled_temperature
from tests.probes.tiny import make_rollouts


def test_raw_log_probs_have_temperature_1_for_any_sampling() -> None:
    rollouts = make_rollouts(4, attributes=BatchAttributes(temperature=0.7, top_p=0.9, logprobs_mode="raw_logprobs"))
    assert divisors(rollouts).tolist() == [1.0] * 4


def test_unknown_mode_counts_as_raw() -> None:
    rollouts = make_rollouts(4, attributes=BatchAttributes(temperature=0.7))
    assert divisors(rollouts).tolist() == [1.0] * 4


def test_processed_log_probs_use_the_temperature_of_the_batch() -> None:
    rollouts = make_rollouts(2, attributes=BatchAttributes(temperature=0.5, logprobs_mode="processed_logprobs"))
    assert divisors(rollouts).tolist() == [0.5, 0.5]
    assert sampled_temperature(divisors(rollouts)) == 0.5


def test_temperature_of_a_rollout_overrides_the_batch() -> None:
    attributes = BatchAttributes(temperature=0.5, logprobs_mode="processed_logprobs")
    rollouts = make_rollouts(3, attributes=attributes, temperature=[2.0, float("nan"), 0.25])
    assert divisors(rollouts).tolist() == [2.0, 0.5, 0.25]
    assert sampled_temperature(divisors(rollouts)) is None


def test_option_of_the_scorer_overrides_all_temperatures() -> None:
    rollouts = make_rollouts(2, attributes=BatchAttributes(temperature=0.5, logprobs_mode="processed_logprobs"))
    assert divisors(rollouts, override=3.0).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("cut", "name"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"temperature": 0.0}, "greedily"),
    ],
)
def test_processed_log_probs_of_truncated_distribution_raise(cut: dict[str, Any], name: str) -> None:
    rollouts = make_rollouts(2, attributes=BatchAttributes(logprobs_mode="processed_logprobs", **cut))
    with pytest.raises(UnsupportedScoreError, match=f"{name}.*raw_logprobs"):
        divisors(rollouts)


def test_truncation_parameters_without_effect_are_accepted() -> None:
    attributes = BatchAttributes(top_p=1.0, top_k=-1, min_p=0.0, temperature=1.0, logprobs_mode="processed_logprobs")
    assert divisors(make_rollouts(2, attributes=attributes)).tolist() == [1.0, 1.0]


def test_error_names_the_truncated_rollout() -> None:
    attributes = BatchAttributes(logprobs_mode="processed_logprobs")
    rollouts = make_rollouts(3, attributes=attributes, top_p=[1.0, 1.0, 0.5])
    with pytest.raises(UnsupportedScoreError, match="rollout 2"):
        divisors(rollouts)
