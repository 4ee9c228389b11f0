"""Scorers divide logits by the temperature of the logged distribution and refuse truncated distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foreshock.rollouts import BatchAttributes
from foreshock_probes.scorers.forward_pass import LogitProcessing
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.sampling import LoggedDistribution, divisors, sampled_temperature
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


LOGITS = torch.log(torch.tensor([[0.05, 0.4, 0.3, 0.15, 0.1]]))


def kept(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[int]:
    one = LoggedDistribution(
        np.array([temperature]), np.array([top_p]), np.array([top_k], dtype=np.int64), np.array([min_p])
    )
    processed = LogitProcessing(one, torch.device("cpu"))(LOGITS, torch.tensor([0]))
    return torch.isfinite(processed[0]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.6}, [1, 2]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"top_p": 1e-6}, [1]),
        ({"min_p": 0.3}, [1, 2, 3]),
        # Of the three largest, 0.4/0.85 and 0.3/0.85 are 0.82 of the mass.
        ({"top_k": 3, "top_p": 0.8}, [1, 2]),
        # Squared probabilities, renormalised: 0.55, 0.31, 0.08, 0.03, 0.01.
        ({"temperature": 0.5, "top_p": 0.9}, [1, 2, 3]),
        ({"temperature": 0.5, "min_p": 0.3}, [1, 2]),
    ],
)
def test_tokens_kept(distribution: dict[str, float], expected: list[int]) -> None:
    assert kept(**distribution) == expected  # type: ignore[arg-type]


def test_rows_have_their_own_distribution() -> None:
    mixed = LoggedDistribution(np.array([1.0, 2.0]), np.array([1.0, 0.6]), np.zeros(2, dtype=np.int64), np.zeros(2))
    processed = LogitProcessing(mixed, torch.device("cpu"))(LOGITS.repeat(3, 1), torch.tensor([0, 1, 0]))
    assert torch.equal(processed[0], LOGITS[0])
    assert torch.equal(processed[2], LOGITS[0])
    assert torch.isfinite(processed[1]).sum() < 5
