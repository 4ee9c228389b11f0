"""Statistics of a step and of a comparison: hand-counted values, array types, sizes, and names of groups."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from foreshock.errors import InvalidRolloutsError
from foreshock.measures import ComparisonStatistics, StepStatistics, compare, measure_step
from foreshock.measures.inputs import truncated_rollouts
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.measures.direct import direct_lengths


def test_step_measures_equal_hand_counted_values() -> None:
    batch = random_batch(4, 30)
    found = StepStatistics.of(batch).measures()
    lengths = direct_lengths(batch)
    generated = batch.generated
    assert batch.reward is not None
    assert batch.entropy is not None
    assert batch.weights_version is not None
    assert found["num_rollouts"] == 30
    assert found["num_tokens"] == lengths.sum()
    assert found["num_tool_tokens"] == batch.num_tokens - lengths.sum()
    assert found["response_length_mean"] == pytest.approx(lengths.mean(), rel=1e-15)
    assert found["response_length_max"] == lengths.max()
    for percent in (50, 90, 99):
        expected = np.quantile(lengths, percent / 100, method="inverted_cdf")
        assert found[f"response_length_p{percent}"] == expected
    assert found["truncated_fraction"] == 10 / 30
    rewards = batch.reward.astype(np.float64)
    assert found["reward_mean"] == pytest.approx(rewards.mean(), rel=1e-14)
    truncated, known = truncated_rollouts(batch)
    assert known.all()
    assert found["finished_reward_mean"] == pytest.approx(rewards[~truncated].mean(), rel=1e-14)
    assert found["entropy_mean"] == pytest.approx(batch.entropy[generated].astype(np.float64).mean(), rel=1e-14)
    assert found["lag_mean"] == pytest.approx((6 - batch.weights_version[generated]).mean(), rel=1e-14)
    assert found["lag_max"] == (6 - batch.weights_version[generated]).max()


def test_missing_columns_give_nan() -> None:
    found = StepStatistics.of(RolloutBatch.from_lists(["a"], [[1]], [[1, 2]])).measures()
    missing = {name for name, value in found.items() if math.isnan(value)}
    assert missing == {
        "truncated_fraction", "turns_mean", "reward_mean", "finished_reward_mean", "entropy_mean", "lag_mean", "lag_max"
    }  # fmt: skip


def test_missing_rewards_are_ignored() -> None:
    batch = RolloutBatch.from_lists(["a", "b"], [[1]] * 2, [[1]] * 2, reward=[math.nan, 3.0])
    found = StepStatistics.of(batch).measures()
    assert found["reward_mean"] == 3.0


def test_without_a_finish_reason_a_response_at_the_cap_is_truncated() -> None:
    rows: dict[str, Any] = {
        "sample_ids": ["a", "b", "c"],
        "prompt_token_ids": [[1]] * 3,
        "response_token_ids": [[1] * 4, [1] * 2, [1] * 4],
    }
    capped = RolloutBatch.from_lists(**rows, attributes=BatchAttributes(length_cap=4))
    assert StepStatistics.of(capped).measures()["truncated_fraction"] == pytest.approx(2 / 3)
    with_reasons = dataclasses.replace(capped, finish_reasons=["stop", None, "length"])
    assert StepStatistics.of(with_reasons).measures()["truncated_fraction"] == pytest.approx(1 / 3)
    unknown = dataclasses.replace(with_reasons, attributes=BatchAttributes())
    assert StepStatistics.of(unknown).measures()["truncated_fraction"] == pytest.approx(1 / 2)


def test_turns_are_runs_of_one_number_among_generated_tokens() -> None:
    batch = RolloutBatch.from_lists(
        ["a", "b"], [[1]] * 2, [[1, 2, 3, 4], [1, 2]],
        turn=[[0, 0, 1, 2], [0, 0]], response_mask=[[1, 1, 0, 1], [1, 1]],
    )  # fmt: skip
    assert StepStatistics.of(batch).measures()["turns_mean"] == 1.5


def test_summaries_hold_the_metadata_of_each_rollout() -> None:
    batch = random_batch(7, 20)
    assert batch.advantage is not None
    table = compared(batch).summaries.table.to_pylist()
    for row, line in enumerate(table):
        tokens = slice(int(batch.response_offsets[row]), int(batch.response_offsets[row + 1]))
        keep = batch.generated[tokens]
        assert line["sample_id"] == batch.sample_ids[row]
        assert line["group_id"] == f"prompt-{row // 4}"
        assert line["n_tokens"] == line["length"] == keep.sum()
        assert line["truncated"] == (row % 3 == 0)
        if not keep.any():
            assert line["min_d"] is line["max_d"] is line["advantage"] is line["lag"] is None
            continue
        assert line["advantage"] == pytest.approx(batch.advantage[tokens][keep].astype(np.float64).mean(), rel=1e-9)


def test_step_with_only_one_log_prob_has_no_comparison() -> None:
    batch = RolloutBatch.from_lists(["a"], [[1]], [[1]], rollout_log_probs=[[-1.0]])
    assert measure_step(batch).comparisons == {}


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
        ({"target": TARGET[:2]}, "target"), ({"target": [[-1.0, -2.0], [-3.0]]}, "target"),
        ({"behaviour": ["a", "b", "c"]}, "behaviour"), ({"behaviour": np.array(BEHAVIOUR, complex)}, "behaviour"),
        ({"offsets": [0.0, 2.0, 3.0]}, "offsets"), ({"mask": [1, 0]}, "response_mask"),
        ({"entropy": [None, 1.0, 2.0]}, "entropy"), ({"turn": [0.0, 1.5, 2.0]}, "turn"),
        ({"lag": [0.0, np.nan, 2.0]}, "lag"), ({"token_ids": [1.0, 2.0, 3.0]}, "response_token_ids"),
        ({"advantage": [1.0]}, "advantage"), ({"group_ids": ["a"]}, "group_id"),
        ({"group_ids": ["a", "b", "c"]}, "group_id"),
    ],
)  # fmt: skip
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
