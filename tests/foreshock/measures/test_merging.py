"""However rollouts are split into shards and in whatever order shards are merged, a step is the same."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.errors import StatisticsError
from foreshock.measures import ComparisonStatistics, RolloutSummaries, StepStatistics, fold, fold_steps, measure_step
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch


def assert_alike(one: dict[str, float], two: dict[str, float], relative: float) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        if name.endswith(("_low", "_high")):
            # Residuals are squares of small differences: what an interval needs, not what a sum can promise.
            assert value == pytest.approx(two[name], rel=1e-7, nan_ok=True), name
        else:
            assert value == pytest.approx(two[name], rel=relative, abs=0.0, nan_ok=True), name


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(1, 29), max_size=6, unique=True).map(sorted),
    order=st.randoms(use_true_random=False),
    largest=st.sampled_from([1e-4, 1.0, 30.0]),
)
def test_any_split_in_any_order_gives_the_same_numbers(
    seed: int, cuts: list[int], order: object, largest: float
) -> None:
    batch = random_batch(seed, 30, 50, 1e-6, largest)
    whole = measure_step(batch)
    rows = np.random.default_rng(seed).permutation(30)
    shards = [measure_step(batch.select(part)) for part in np.split(rows, cuts)]
    order.shuffle(shards)  # type: ignore[attr-defined]
    comparisons = [shard.comparisons["trainer/rollout"].statistics for shard in shards]
    merged, alone = fold(comparisons), whole.comparisons["trainer/rollout"].statistics
    np.testing.assert_array_equal(merged.counts, alone.counts)
    np.testing.assert_array_equal(merged.histogram, alone.histogram)
    np.testing.assert_array_equal(merged.extremes, alone.extremes)
    for condition, table in alone.conditions.items():
        np.testing.assert_array_equal(merged.conditions[condition].tokens, table.tokens)
    np.testing.assert_array_equal(merged.clusters.keys, alone.clusters.keys)
    np.testing.assert_array_equal(merged.clusters.tokens, alone.clusters.tokens)
    np.testing.assert_allclose(merged.sums.value, alone.sums.value, rtol=1e-12, atol=0.0)
    assert_alike(merged.measures(), alone.measures(), 1e-12)
    assert_alike(fold_steps(shard.step for shard in shards).measures(), whole.step.measures(), 1e-12)


def test_merging_pairwise_is_merging_in_a_row() -> None:
    shards = [measure_step(random_batch(seed)).comparisons["trainer/rollout"].statistics for seed in range(4)]
    in_pairs = shards[0].merge(shards[1]).merge(shards[2].merge(shards[3]))
    assert_alike(in_pairs.measures(), fold(shards).measures(), 1e-12)


def test_the_same_fold_gives_the_same_bytes() -> None:
    shards = [measure_step(random_batch(seed)).comparisons["trainer/rollout"].statistics for seed in range(5)]
    again = [ComparisonStatistics.from_bytes(shard.to_bytes()) for shard in shards]
    assert fold(shards).to_bytes() == fold(again).to_bytes()


def test_a_group_cut_by_shards_is_one_cluster() -> None:
    batch = random_batch(0, 8)
    shards = [measure_step(batch.select([row])).comparisons["trainer/rollout"].statistics for row in range(8)]
    assert fold(shards).clusters.count == 2


def test_nothing_cannot_be_folded() -> None:
    with pytest.raises(StatisticsError):
        fold([])
    with pytest.raises(StatisticsError):
        fold_steps([])


def test_summaries_are_put_together_in_order() -> None:
    batch = random_batch(0, 10)
    whole = measure_step(batch).comparisons["trainer/rollout"].summaries
    parts = [
        measure_step(batch.select(rows)).comparisons["trainer/rollout"].summaries for rows in (range(4), range(4, 10))
    ]
    assert RolloutSummaries.concat(parts).table.equals(whole.table)
    assert RolloutSummaries.concat([]).num_rollouts == 0


def non_finite_batch() -> tuple[RolloutBatch, RolloutBatch]:
    """A batch with broken log-probs, and the same batch without the tokens that have them."""
    good = [[-1.0, -0.5], [-0.25, -2.0, -0.125]]
    broken = RolloutBatch.from_lists(
        ["a", "b", "c"],
        [[1]] * 3,
        [[1, 2, 3, 4], [1, 2, 3, 4], [1]],
        rollout_log_probs=[[-1.0, math.nan, -0.5, -1.0], [*good[1], -1.0], [-1.0]],
        trainer_log_probs=[[-1.1, -1.0, -0.4, math.inf], [-0.2, -2.5, -0.125, -math.inf], [math.nan]],
    )
    clean = RolloutBatch.from_lists(
        ["a", "b"],
        [[1]] * 2,
        [[1, 3], [1, 2, 3]],
        rollout_log_probs=good,
        trainer_log_probs=[[-1.1, -0.4], [-0.2, -2.5, -0.125]],
    )
    return broken, clean


def test_non_finite_log_probs_are_counted_and_kept_out_of_every_mean() -> None:
    broken, clean = (measure_step(batch).comparisons["trainer/rollout"].statistics for batch in non_finite_batch())
    found, wanted = broken.measures(), clean.measures()
    counted = {"nonfinite_target": 3, "nonfinite_behaviour": 1, "incomplete_rollouts": 3, "rollouts": 3}
    assert {name: found.pop(name) for name in counted} == counted
    for name in counted:
        wanted.pop(name)
    assert_alike(found, wanted, 1e-15)
    assert measure_step(non_finite_batch()[0]).step.measures()["nonfinite_log_probs"] == 4
    assert broken.buckets().tokens.sum() == broken.histogram.sum() + broken.count("zero_tokens") == 5


def test_a_step_without_a_measured_token_has_no_values() -> None:
    batch = RolloutBatch.from_lists(
        ["a", "b"], [[1]] * 2, [[1], []], rollout_log_probs=[[math.nan], []], trainer_log_probs=[[-1.0], []]
    )
    statistics = measure_step(batch).comparisons["trainer/rollout"].statistics
    counts = {"tokens", "rollouts", "incomplete_rollouts", "nonfinite_target", "nonfinite_behaviour"}
    found = statistics.measures()
    assert all(math.isnan(value) for name, value in found.items() if name not in counts), found
    assert_alike(ComparisonStatistics.from_bytes(statistics.to_bytes()).measures(), found, 0.0)
    full = measure_step(random_batch(1)).comparisons["trainer/rollout"].statistics
    unmoved = counts - {"tokens"}
    merged, alone = full.merge(statistics).measures(), full.measures()
    assert_alike(
        {name: value for name, value in merged.items() if name not in unmoved},
        {name: value for name, value in alone.items() if name not in unmoved},
        0.0,
    )


def test_differences_beyond_the_range_of_exp_are_infinite_and_never_nan() -> None:
    """A trainer that fills masked logits with −1e9 must not poison what does not depend on it."""
    batch = RolloutBatch.from_lists(
        ["a", "b"], [[1]] * 2, [[1, 2], [3]],
        rollout_log_probs=[[-0.5, -1e9], [-0.25]], trainer_log_probs=[[-1e9, -0.5], [-0.25]],
    )  # fmt: skip
    found = measure_step(batch).comparisons["trainer/rollout"].statistics.measures()
    assert found["k3_kl"] == math.inf
    assert found["reverse_chi2_token"] == math.inf
    assert found["tv_token"] == pytest.approx(1 / 3)
    assert found["ess_token"] == pytest.approx(1 / 3)
    assert found["tail_10"] == pytest.approx(2 / 3)
    assert found["max_abs_d"] == pytest.approx(1e9)
    assert math.isnan(found["ess_seq"])
    assert math.isnan(found["k3_kl_low"])
    assert measure_step(batch).step.merge(measure_step(batch).step).tokens == 6


@pytest.mark.parametrize("kind", [ComparisonStatistics, StepStatistics])
def test_merging_does_not_change_its_parts(kind: type) -> None:
    one, two = measure_step(random_batch(1)), measure_step(random_batch(2))
    pair = (one.step, two.step)
    if kind is ComparisonStatistics:
        pair = tuple(part.comparisons["trainer/rollout"].statistics for part in (one, two))  # type: ignore[assignment]
    before = [part.to_bytes() for part in pair]
    functools.reduce(kind.merge, pair)
    assert [part.to_bytes() for part in pair] == before
