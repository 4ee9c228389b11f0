"""Bucket tables, tails and weight sums equal a direct evaluation, also with masked and non-finite tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures import ComparisonStatistics, compare
from foreshock.measures.statistics.conditions import (
    BUCKET_EDGES,
    CONDITIONS,
)
from foreshock.measures.statistics.histograms import WEIGHT_GRID
from foreshock.measures.statistics.tails import LARGEST_VALUES, REGIONS, TAIL_LEVELS, TAIL_SUMS
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.measures.direct import (
    DirectSums,
    Sequence,
    broken_batch,
    direct_condition,
    direct_token_ids,
    measured_sequences,
    tail_terms,
)

SIZES = st.sampled_from([(1e-6, 1e-4), (1e-6, 1.0), (1e-3, 3.0), (1e-6, 30.0), (5.0, 30.0)])


def measured(batch: RolloutBatch) -> tuple[ComparisonStatistics, Sequence]:
    """Return the library's statistics, and the tokens for a direct evaluation."""
    sequences, _ = measured_sequences(batch)
    statistics = compared(batch).statistics
    return statistics, [token for sequence in sequences for token in sequence]


def assert_sums(found: np.ndarray, expected: list[float], absolute: list[float]) -> None:
    """Assert equality to 1e-12 of the sum of absolute values, since terms may cancel."""
    for value, exact, scale in zip(found.tolist(), expected, absolute, strict=True):
        assert value == pytest.approx(exact, rel=1e-12, abs=1e-12 * scale)


def absolute_of(sums: DirectSums) -> list[float]:
    return [sums.sums[0], sums.sums[0], sums.sums[2], sums.sums[3]]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000), rollouts=st.integers(1, 20), sizes=SIZES)
def test_every_table_equals_a_direct_evaluation(seed: int, rollouts: int, sizes: tuple[float, float]) -> None:
    statistics, tokens = measured(broken_batch(seed, rollouts, sizes))
    for name, buckets in statistics.conditions.items():
        expected = direct_condition(name, tokens)
        assert buckets.tokens.tolist() == [bucket.tokens for bucket in expected], name
        assert buckets.max_abs_d.tolist() == [bucket.largest for bucket in expected], name
        for sums, bucket in zip(buckets.sums, expected, strict=True):
            assert_sums(sums, bucket.sums, absolute_of(bucket))
    of_ids = direct_token_ids(tokens)
    assert statistics.token_ids.ids.tolist() == list(of_ids)
    assert statistics.token_ids.tokens.tolist() == [sums.tokens for sums in of_ids.values()]
    for sums, wanted_id in zip(statistics.token_ids.sums, of_ids.values(), strict=True):
        distance, d, k3, _ = wanted_id.sums
        assert_sums(sums, [d, distance, k3], [distance, distance, k3])


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000), rollouts=st.integers(1, 20), sizes=SIZES)
def test_tails_weights_and_largest_values_equal_a_direct_evaluation(
    seed: int, rollouts: int, sizes: tuple[float, float]
) -> None:
    statistics, tokens = measured(broken_batch(seed, rollouts, sizes))
    d = [token.d for token in tokens]
    assert statistics.largest_d.tolist() == sorted(d, reverse=True)[:LARGEST_VALUES]
    assert statistics.largest_minus_d.tolist() == sorted((-value for value in d), reverse=True)[:LARGEST_VALUES]
    assert statistics.histogram.sum() + statistics.count("zero_tokens") == len(tokens)
    # An edge of the grid belongs to the region above it, a level to the region below it.
    edges = sorted([(edge, 0) for edge in WEIGHT_GRID.edges()[:-1].tolist()] + [(level, 1) for level in TAIL_LEVELS])
    assert len(edges) == REGIONS
    for side in (0, 1):
        in_side = [token for token in tokens if (token.d > 0) == bool(side)]
        regions: list[Sequence] = [[] for _ in edges]
        for token in in_side:
            key = (abs(token.d), 0.5)
            regions[sum(edge <= key for edge in edges) - 1].append(token)
        assert statistics.region_tokens[side].tolist() == [len(region) for region in regions]
        for found, region in zip(statistics.region_sums[side], regions, strict=True):
            columns = list(zip(*map(tail_terms, region), strict=True)) if region else [()] * 4
            assert_sums(found, [math.fsum(c) for c in columns], [math.fsum(map(abs, c)) for c in columns])
        for level in TAIL_LEVELS:
            terms = [tail_terms(token) for token in in_side if abs(token.d) > level]
            assert statistics.tail_count(side, level) == len(terms)
            beyond = statistics.tail_sum(side, level, TAIL_SUMS[0])
            assert beyond == pytest.approx(math.fsum(term[0] for term in terms), rel=1e-12)


@pytest.mark.parametrize("name", sorted(CONDITIONS))
def test_edges_rise_and_every_value_has_a_bucket(name: str) -> None:
    condition = CONDITIONS[name]
    assert (np.diff(condition.edges) > 0).all()
    assert condition.meaning
    assert condition.unit
    inner = np.array(condition.edges[1:-1])
    assert condition.buckets(inner).tolist() == list(range(1, condition.size))
    assert condition.buckets(np.nextafter(inner, -math.inf)).tolist() == list(range(condition.size - 1))
    assert condition.buckets(np.array([-1e30, 1e30])).tolist() == [0, condition.size - 1]


def test_positions_and_lengths_go_to_128k_and_beyond() -> None:
    for name in ("position", "length"):
        assert CONDITIONS[name].edges[-2] > 131_072


def test_condition_without_a_logged_column_has_no_table() -> None:
    """Entropies are those of the logged μ, so another behaviour has none; lags need the trainer's version."""
    batch = random_batch(0)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    other = compare(batch, batch.rollout_log_probs, batch.trainer_log_probs).statistics
    assert other.conditions["entropy"].tokens.sum() == 0
    assert other.conditions["lag"].tokens.sum() == other.tokens > 0
    bare = dataclasses.replace(batch, weights_version=None, turn=None, entropy=None, advantage=None)
    statistics = compare(bare, batch.trainer_log_probs, batch.rollout_log_probs).statistics
    for name in ("lag", "turn", "entropy"):
        assert statistics.conditions[name].tokens.sum() == 0
        assert np.isnan(statistics.condition_table(name).k3_kl).all()
    assert statistics.conditions["length"].tokens.sum() == statistics.tokens
    assert (statistics.region_sums[..., 2:] == 0).all()
    assert math.isnan(statistics.measures()["advantage_skew"])


def test_infinite_ratio_with_zero_advantage_is_not_nan() -> None:
    statistics = ComparisonStatistics.of(
        [-1.0, -1.0, -1.0], [-1001.0, -1001.0, -1.5], [0, 1, 2, 3], advantage=[0.0, 1.0, 0.0], turn=[0, 0, 0]
    )
    found = statistics.measures()
    assert found["advantage_skew_positive"] == math.inf
    assert found["advantage_skew_negative"] == 0.0
    assert found["advantage_d_cov"] == pytest.approx(2000 / 9 * 1.5 - 2000.5 / 9, rel=1e-12)
    assert not np.isnan(statistics.region_sums).any()
    again = ComparisonStatistics.from_bytes(statistics.to_bytes())
    assert again.merge(statistics).measures()["advantage_skew_positive"] == math.inf


def test_edges_are_half_decades_from_1e_8_to_1() -> None:
    assert BUCKET_EDGES[0] == 0.0
    assert BUCKET_EDGES[1] == pytest.approx(1e-8)
    assert BUCKET_EDGES[-1] == 1.0
    np.testing.assert_allclose(np.diff(np.log10(BUCKET_EDGES[1:])), 0.5, rtol=1e-12)


def test_without_tokens_of_low_probability_their_mean_is_undefined() -> None:
    found = ComparisonStatistics.of([-0.2, -0.3], [-0.1, -0.1], [0, 2]).measures()
    assert found["low_probability_tokens"] == 0
    assert math.isnan(found["low_probability_abs_d"])
