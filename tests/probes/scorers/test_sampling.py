"""Scorers divide logits by the temperature of the logged distribution and refuse truncated distributions."""

from __future__ import annotations

from typing import Any

import pytest

from foreshock.rollouts import BatchAttributes
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.sampling import divisors, sampled_temperature
from tests.probes.tiny import make_rollouts

PROCESSED: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}


@pytest.mark.parametrize(
    ("attributes", "columns", "expected"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "logprobs_mode": "raw_logprobs"}, {}, [1.0, 1.0, 1.0]),
        ({"temperature": 0.7}, {}, [1.0, 1.0, 1.0]),  # an unknown mode counts as raw
        ({"temperature": 0.5, **PROCESSED}, {}, [0.5, 0.5, 0.5]),
        ({"temperature": 0.5, **PROCESSED}, {"temperature": [2.0, float("nan"), 0.25]}, [2.0, 0.5, 0.25]),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **PROCESSED}, {}, [1.0, 1.0, 1.0]),
    ],
)
def test_divisors_are_the_temperatures_of_the_logged_distribution(
    attributes: dict[str, Any], columns: dict[str, Any], expected: list[float]
) -> None:
    rollouts = make_rollouts(3, attributes=BatchAttributes(**attributes), **columns)
    found = divisors(rollouts)
    assert found.tolist() == expected
    assert sampled_temperature(found) == (expected[0] if len(set(expected)) == 1 else None)
    assert divisors(rollouts, override=3.0).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("attributes", "columns", "words"),
    [
        ({"top_p": 0.9}, {}, "rollout 0 .* top_p"),
        ({"top_k": 20}, {}, "top_k"),
        ({"min_p": 0.1}, {}, "min_p"),
        ({"temperature": 0.0}, {}, "greedily"),
        ({}, {"top_p": [1.0, 1.0, 0.5]}, "rollout 2 .* top_p"),
    ],
)
def test_processed_log_probs_of_truncated_distribution_raise(
    attributes: dict[str, Any], columns: dict[str, Any], words: str
) -> None:
    rollouts = make_rollouts(3, attributes=BatchAttributes(**PROCESSED, **attributes), **columns)
    with pytest.raises(UnsupportedScoreError, match=f"{words}.*raw_logprobs"):
        divisors(rollouts)
