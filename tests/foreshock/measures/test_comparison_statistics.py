"""Inputs of comparison statistics: array types, sizes, and names of groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foreshock.errors import InvalidRolloutsError
from foreshock.measures import ComparisonStatistics, compare
from foreshock.rollouts import RolloutBatch

TARGET, BEHAVIOUR = [-1.0, -0.5, -3.0], [-1.25, -0.75, -2.0]
OFFSETS = [0, 2, 3]


def test_tensors_in_a_graph_or_in_bfloat16_are_measured() -> None:
    expected = ComparisonStatistics.of(TARGET, BEHAVIOUR, OFFSETS).measures()
    target, behaviour = (torch.tensor(values, requires_grad=True) for values in (TARGET, BEHAVIOUR))
    found = ComparisonStatistics.of(target.bfloat16(), behaviour, torch.tensor(OFFSETS)).measures()
    np.testing.assert_equal(found, expected)
    batch = RolloutBatch.from_lists(["a", "b"], [[1], [1]], [[1, 2], [3]])
    np.testing.assert_equal(compare(batch, target.bfloat16(), behaviour.bfloat16()).statistics.measures(), expected)


def test_groups_may_be_named_by_integers() -> None:
    of_names = ComparisonStatistics.of(TARGET, BEHAVIOUR, OFFSETS, group_ids=["1", None])
    for numbers in ([1, None], np.array([1, None], object)):
        of_numbers = ComparisonStatistics.of(TARGET, BEHAVIOUR, OFFSETS, group_ids=numbers)
        assert of_numbers.to_bytes() == of_names.to_bytes()
    both = ComparisonStatistics.of(TARGET, BEHAVIOUR, OFFSETS, group_ids=torch.tensor([1, 2]))
    assert both.clusters.keys.size == 2
    assert np.isin(of_names.clusters.keys, both.clusters.keys).all()


@pytest.mark.parametrize(
    ("wrong", "column"),
    [
        ({"target": TARGET[:2]}, "target"),
        ({"target": [[-1.0, -2.0], [-3.0]]}, "target"),
        ({"behaviour": ["a", "b", "c"]}, "behaviour"),
        ({"behaviour": np.array(BEHAVIOUR, complex)}, "behaviour"),
        ({"offsets": [0.0, 2.0, 3.0]}, "offsets"),
        ({"mask": [1, 0]}, "response_mask"),
        ({"entropy": [None, 1.0, 2.0]}, "entropy"),
        ({"turn": [0.0, 1.5, 2.0]}, "turn"),
        ({"lag": [0.0, np.nan, 2.0]}, "lag"),
        ({"token_ids": [1.0, 2.0, 3.0]}, "response_token_ids"),
        ({"advantage": [1.0]}, "advantage"),
        ({"group_ids": ["a"]}, "group_id"),
        ({"group_ids": ["a", "b", "c"]}, "group_id"),
    ],
)
def test_invalid_columns_are_named(wrong: dict[str, Any], column: str) -> None:
    given: dict[str, Any] = {"target": TARGET, "behaviour": BEHAVIOUR, "offsets": OFFSETS} | wrong
    with pytest.raises(InvalidRolloutsError) as raised:
        ComparisonStatistics.of(**given)
    assert raised.value.column == column


def test_logits_in_place_of_log_probs_raise_no_error() -> None:
    """Their exp is infinite: measures that need it are infinite or NaN, all others are unchanged."""
    found = ComparisonStatistics.of([800.0, 5.0, -1.0], [-1.0, 800.0, -2.0], OFFSETS, advantage=[1.0, -1.0, 0.0])
    measures = found.measures()
    assert measures["k3_kl"] == measures["rollout_probs_diff_mean"] == measures["advantage_skew"] == np.inf
    assert np.isnan(measures["rollout_probs_diff_std"])
    assert np.isnan(measures["rollout_actor_probs_pearson_corr"])
    assert measures["kl"] == pytest.approx((-801 + 795 - 1) / 3)
    assert measures["tail_10"] == 2 / 3
    again = ComparisonStatistics.from_bytes(found.to_bytes()).merge(found)
    assert again.measures()["kl"] == measures["kl"]
