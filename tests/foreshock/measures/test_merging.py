"""Merging shards: any split and any order give the same step, to the rounding of sums."""

import dataclasses
import functools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.errors import StatisticsError
from foreshock.measures import (
    Comparison,
    ComparisonStatistics,
    RolloutSummaries,
    StepMeasurement,
    StepStatistics,
    fold,
    measure_step,
)
from foreshock.measures.passes import measured, numpy_pass
from foreshock.measures.registry import MEASURES
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch
from tests.foreshock.measures.clustered import k3_interval


def assert_alike(one: dict[str, float], two: dict[str, float], relative: float) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        if name.endswith(("_low", "_high")) and "_bootstrap_" not in name:
            # Residuals are squares of small differences; intervals need fewer digits of them than 1e-12.
            assert value == pytest.approx(two[name], rel=1e-7, nan_ok=True), name
        else:
            assert value == pytest.approx(two[name], rel=relative, abs=0.0, nan_ok=True), name


def assert_same_sums(merged: ComparisonStatistics, alone: ComparisonStatistics, largest: ComparisonStatistics) -> None:
    """Assert that integers and extremes are identical, and sums equal to 1e-12.

    Where advantages of both signs cancel, to 1e-12 of the sum of absolute values, given by `largest`: the statistics of
    the same rollouts with |A| for A.
    """
    for name in ("counts", "histogram", "extremes", "region_tokens", "largest_d", "largest_minus_d"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(alone, name), err_msg=name)
    np.testing.assert_allclose(merged.sums, alone.sums, rtol=1e-12, atol=0.0)
    found, expected, scale = (part.region_sums for part in (merged, alone, largest))
    assert (np.abs(found - expected) <= 1e-12 * np.abs(scale)).all()
    for condition, table in alone.conditions.items():
        of_both = merged.conditions[condition]
        np.testing.assert_array_equal(of_both.tokens, table.tokens)
        np.testing.assert_array_equal(of_both.max_abs_d, table.max_abs_d)
        np.testing.assert_allclose(of_both.sums, table.sums, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(merged.token_ids.ids, alone.token_ids.ids)
    np.testing.assert_array_equal(merged.token_ids.tokens, alone.token_ids.tokens)
    np.testing.assert_allclose(merged.token_ids.sums, alone.token_ids.sums, rtol=1e-12, atol=0.0)
    np.testing.assert_array_equal(merged.clusters.keys, alone.clusters.keys)
    np.testing.assert_array_equal(merged.clusters.tokens, alone.clusters.tokens)


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(1, 29), max_size=6, unique=True).map(sorted),
    order=st.randoms(use_true_random=False),
    largest=st.sampled_from([1e-4, 1.0, 30.0]),
    chunk=st.sampled_from([1, 16, 200, measured.CHUNK_TOKENS]),
)
def test_any_split_and_order_sums_alike(seed: int, cuts: list[int], order: object, largest: float, chunk: int) -> None:
    batch = random_batch(seed, 30, 50, 1e-6, largest)
    assert batch.advantage is not None
    whole = measure_step(batch)
    rows = np.random.default_rng(seed).permutation(30)
    with pytest.MonkeyPatch.context() as patch:
        for module in (measured, numpy_pass):
            patch.setattr(module, "CHUNK_TOKENS", chunk)
        shards = [measure_step(batch.select(part)) for part in np.split(rows, cuts)]
    order.shuffle(shards)  # type: ignore[attr-defined]
    comparisons = [shard.comparisons["trainer/rollout"] for shard in shards]
    merged, alone = fold(part.statistics for part in comparisons), whole.comparisons["trainer/rollout"]
    absolute = measure_step(dataclasses.replace(batch, advantage=np.abs(batch.advantage)))
    assert_same_sums(merged, alone.statistics, absolute.comparisons["trainer/rollout"].statistics)
    summaries = RolloutSummaries.concat(part.summaries for part in comparisons)
    assert_alike(Comparison(merged, summaries).measures(), alone.measures(), 1e-12)
    assert_alike(fold(shard.step for shard in shards).measures(), whole.step.measures(), 1e-12)


def test_same_fold_gives_the_same_bytes() -> None:
    shards = [measure_step(random_batch(seed)).comparisons["trainer/rollout"].statistics for seed in range(5)]
    again = [ComparisonStatistics.from_bytes(shard.to_bytes()) for shard in shards]
    assert fold(shards).to_bytes() == fold(again).to_bytes()


def test_fold_of_no_parts_is_rejected() -> None:
    with pytest.raises(StatisticsError, match="at least one part"):
        fold([])


def test_rollout_with_a_missing_log_prob_is_in_no_measure_of_sequences() -> None:
    whole = random_batch(5, 12, 30)
    log_probs = whole.rollout_log_probs.copy() if whole.rollout_log_probs is not None else None
    assert log_probs is not None
    holes = whole.response_offsets[1:4] - 1
    log_probs[holes] = np.nan
    lengths = whole.generated_lengths
    broken = measure_step(dataclasses.replace(whole, rollout_log_probs=log_probs)).comparisons["trainer/rollout"]
    hit = [row for row in range(3) if lengths[row] and (whole.response_mask is None or whole.response_mask[holes[row]])]
    others = measure_step(whole.select([row for row in range(12) if row not in hit])).comparisons["trainer/rollout"]
    found, expected = broken.statistics.measures(), others.statistics.measures()
    assert found["incomplete_rollouts"] == len(hit) > 0
    assert math.isfinite(expected["ess_turn"])
    for name in [each.column for each in MEASURES if each.kind == "sequence"]:
        assert found[name] == pytest.approx(expected[name], rel=1e-12, nan_ok=True), name
    assert found["tokens"] > expected["tokens"], "measures of tokens keep the others of these rollouts"


def test_placeholders_are_counted_apart_and_the_rest_is_measured() -> None:
    mu, pi = [-0.5, -9999.0, 0.06, -1.0], [-0.4, -0.5, 0.05, -65504.0]
    batch = RolloutBatch.from_lists(["a"], [[1]], [[1, 2, 3, 4]], rollout_log_probs=[mu], trainer_log_probs=[pi])
    found = measure_step(batch)
    measures = found.comparisons["trainer/rollout"].statistics.measures()
    assert (measures["tokens"], measures["nonfinite_behaviour"], measures["nonfinite_target"]) == (2, 1, 1)
    d = [np.float32(one) - np.float32(other) for one, other in ((-0.4, -0.5), (0.05, 0.06))]
    assert measures["k3_kl"] == pytest.approx(sum(math.expm1(value) - value for value in d) / 2, rel=1e-5)
    assert found.step.measures()["nonfinite_log_probs"] == 2


@pytest.mark.parametrize("kind", [ComparisonStatistics, StepStatistics])
def test_merging_leaves_its_parts_unchanged(kind: Any) -> None:
    one, two = measure_step(random_batch(1)), measure_step(random_batch(2))
    pair = (one.step, two.step)
    if kind is ComparisonStatistics:
        pair = tuple(part.comparisons["trainer/rollout"].statistics for part in (one, two))  # type: ignore[assignment]
    before = [part.to_bytes() for part in pair]
    functools.reduce(kind.merge, pair)
    assert [part.to_bytes() for part in pair] == before


def sent(measurement: StepMeasurement) -> StepMeasurement:
    """Return the measurement as it arrives from another process."""
    arrived: StepMeasurement = pickle.loads(pickle.dumps(measurement))
    return arrived


def all_measures(measurement: StepMeasurement) -> dict[str, float]:
    return measurement.step.measures() | measurement.comparisons["trainer/rollout"].measures()


def test_ranks_exchange_the_stored_form_for_any_vocabulary() -> None:
    batch = random_batch(0, 40, 600)
    ids = np.random.default_rng(0).permutation(150_000)[: batch.num_tokens].astype(np.int32)
    measurement = measure_step(dataclasses.replace(batch, response_token_ids=ids))
    here = measurement.comparisons["trainer/rollout"].statistics
    there = sent(measurement).comparisons["trainer/rollout"].statistics
    assert there.to_bytes() == here.to_bytes()
    assert len(pickle.dumps(here)) < len(here.to_bytes()) + 200
    np.testing.assert_equal(all_measures(sent(measurement)), all_measures(measurement))
    table = there.token_id_table(10**6)
    assert table.token_ids.size == 512 < here.token_id_table(10**6).token_ids.size
    assert table.k3_sum_unnamed == here.token_id_table(513).k3_sum[-1]


def test_measurements_of_different_comparisons_are_not_folded() -> None:
    batch = random_batch(0)
    without = measure_step(dataclasses.replace(batch, trainer_log_probs=None))
    with pytest.raises(StatisticsError, match="same comparisons"):
        fold([measure_step(batch), without])


def test_equal_sample_ids_of_two_ranks_stay_two_rollouts() -> None:
    """Ranks number their own rows. Without prompt groups each row is a cluster by itself, whatever its id."""
    ranks = [dataclasses.replace(random_batch(seed, 6, 40), group_ids=None) for seed in range(2)]
    numbered = [dataclasses.replace(batch, sample_ids=[str(row) for row in range(6)]) for batch in ranks]
    apart = measure_step(RolloutBatch.concat(ranks)).comparisons["trainer/rollout"]
    alike = fold(measure_step(batch) for batch in numbered).comparisons["trainer/rollout"]
    assert np.unique(alike.summaries.clusters()).size == 12
    one, two = (k3_interval(part.summaries) for part in (apart, alike))
    assert one.clusters == two.clusters == apart.measures()["prompt_groups"]
    assert (two.low, two.high) == pytest.approx((one.low, one.high), rel=1e-9)
    assert math.isfinite(alike.measures()["k3_kl_bootstrap_low"])
