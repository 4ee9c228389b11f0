"""Step statistics: lengths, truncation, rewards, entropy, turns and lag against hand-counted values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from foreshock.measures import StepStatistics, measure_step
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
    assert found["entropy_mean"] == pytest.approx(batch.entropy[generated].astype(np.float64).mean(), rel=1e-14)
    assert found["lag_mean"] == pytest.approx((6 - batch.weights_version[generated]).mean(), rel=1e-14)
    assert found["lag_max"] == (6 - batch.weights_version[generated]).max()


def test_missing_columns_give_nan() -> None:
    found = StepStatistics.of(RolloutBatch.from_lists(["a"], [[1]], [[1, 2]])).measures()
    missing = {name for name, value in found.items() if math.isnan(value)}
    assert missing == {"truncated_fraction", "turns_mean", "reward_mean", "entropy_mean", "lag_mean", "lag_max"}


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
