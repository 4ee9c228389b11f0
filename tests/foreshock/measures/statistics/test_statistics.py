"""Bins, bucket tables, tails and sums by token id equal a direct evaluation, in any order of merging."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures import ComparisonStatistics, compare
from foreshock.measures.statistics import conditions
from foreshock.measures.statistics.histograms import LENGTH_GRID, LOG_RATIO_GRID, WEIGHT_GRID, LengthStatistics
from foreshock.measures.statistics.tails import LARGEST_VALUES, REGIONS, TAIL_LEVELS, TAIL_SUMS
from foreshock.measures.statistics.token_ids import KEPT_TOKEN_IDS, TokenIdSums
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.measures import direct

SIZES = st.sampled_from([(1e-6, 1e-4), (1e-6, 1.0), (1e-3, 3.0), (1e-6, 30.0), (5.0, 30.0)])


def measured(batch: RolloutBatch) -> tuple[ComparisonStatistics, direct.Sequence]:
    """Return the library's statistics, and the tokens for a direct evaluation."""
    sequences, _ = direct.measured_sequences(batch)
    statistics = compared(batch).statistics
    return statistics, [token for sequence in sequences for token in sequence]


def assert_sums(found: np.ndarray, expected: list[float], absolute: list[float]) -> None:
    """Assert equality to 1e-12 of the sum of absolute values, since terms may cancel."""
    for value, exact, scale in zip(found.tolist(), expected, absolute, strict=True):
        assert value == pytest.approx(exact, rel=1e-12, abs=1e-12 * scale)


def absolute_of(sums: direct.DirectSums) -> list[float]:
    return [sums.sums[0], sums.sums[0], sums.sums[2], sums.sums[3]]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000), rollouts=st.integers(1, 20), sizes=SIZES)
def test_every_table_equals_a_direct_evaluation(seed: int, rollouts: int, sizes: tuple[float, float]) -> None:
    statistics, tokens = measured(direct.broken_batch(seed, rollouts, sizes))
    for name, buckets in statistics.conditions.items():
        expected = direct.direct_condition(name, tokens)
        assert buckets.tokens.tolist() == [bucket.tokens for bucket in expected], name
        assert buckets.max_abs_d.tolist() == [bucket.largest for bucket in expected], name
        for sums, bucket in zip(buckets.sums, expected, strict=True):
            assert_sums(sums, bucket.sums, absolute_of(bucket))
    of_ids = direct.direct_token_ids(tokens)
    assert statistics.token_ids.ids.tolist() == list(of_ids)
    assert statistics.token_ids.tokens.tolist() == [sums.tokens for sums in of_ids.values()]
    for sums, wanted_id in zip(statistics.token_ids.sums, of_ids.values(), strict=True):
        distance, d, k3, _ = wanted_id.sums
        assert_sums(sums, [d, distance, k3], [distance, distance, k3])


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 100_000), rollouts=st.integers(1, 20), sizes=SIZES)
def test_tails_and_largest_values_equal_direct_ones(seed: int, rollouts: int, sizes: tuple[float, float]) -> None:
    statistics, tokens = measured(direct.broken_batch(seed, rollouts, sizes))
    d = [token.d for token in tokens]
    assert statistics.largest_d.tolist() == sorted(d, reverse=True)[:LARGEST_VALUES]
    assert statistics.largest_minus_d.tolist() == sorted((-value for value in d), reverse=True)[:LARGEST_VALUES]
    assert statistics.histogram.sum() + statistics.count("zero_tokens") == len(tokens)
    # An edge of the grid belongs to the region above it, a level to the region below it.
    edges = sorted([(edge, 0) for edge in WEIGHT_GRID.edges()[:-1].tolist()] + [(level, 1) for level in TAIL_LEVELS])
    assert len(edges) == REGIONS
    for side in (0, 1):
        in_side = [token for token in tokens if (token.d > 0) == bool(side)]
        regions: list[direct.Sequence] = [[] for _ in edges]
        for token in in_side:
            key = (abs(token.d), 0.5)
            regions[sum(edge <= key for edge in edges) - 1].append(token)
        assert statistics.region_tokens[side].tolist() == [len(region) for region in regions]
        for found, region in zip(statistics.region_sums[side], regions, strict=True):
            columns = list(zip(*map(direct.tail_terms, region), strict=True)) if region else [()] * 4
            assert_sums(found, [math.fsum(c) for c in columns], [math.fsum(map(abs, c)) for c in columns])
        for level in TAIL_LEVELS:
            terms = [direct.tail_terms(token) for token in in_side if abs(token.d) > level]
            assert statistics.tail_count(side, level) == len(terms)
            beyond = statistics.tail_sum(side, level, TAIL_SUMS[0])
            assert beyond == pytest.approx(math.fsum(term[0] for term in terms), rel=1e-12)


@pytest.mark.parametrize("name", sorted(conditions.CONDITIONS))
def test_edges_rise_and_every_value_has_a_bucket(name: str) -> None:
    condition = conditions.CONDITIONS[name]
    assert (np.diff(condition.edges) > 0).all()
    assert condition.meaning
    assert condition.unit
    inner = np.array(condition.edges[1:-1])
    assert condition.buckets(inner).tolist() == list(range(1, condition.size))
    assert condition.buckets(np.nextafter(inner, -math.inf)).tolist() == list(range(condition.size - 1))
    assert condition.buckets(np.array([-1e30, 1e30])).tolist() == [0, condition.size - 1]


def test_positions_and_lengths_go_to_128k_and_beyond() -> None:
    for name in ("position", "length"):
        assert conditions.CONDITIONS[name].edges[-2] > 131_072


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
    assert conditions.BUCKET_EDGES[0] == 0.0
    assert conditions.BUCKET_EDGES[1] == pytest.approx(1e-8)
    assert conditions.BUCKET_EDGES[-1] == 1.0
    np.testing.assert_allclose(np.diff(np.log10(conditions.BUCKET_EDGES[1:])), 0.5, rtol=1e-12)


def test_without_tokens_of_low_probability_their_mean_is_undefined() -> None:
    found = ComparisonStatistics.of([-0.2, -0.3], [-0.1, -0.1], [0, 2]).measures()
    assert found["low_probability_tokens"] == 0
    assert math.isnan(found["low_probability_abs_d"])


@settings(deadline=None)
@given(st.floats(0, 1e6))
def test_value_lies_between_the_edges_of_its_bin(value: float) -> None:
    for grid in (LOG_RATIO_GRID, LENGTH_GRID):
        index = int(grid.bins(np.array([value]))[0])
        assert grid.lower_edge(index) <= value < grid.upper_edge(index)


def test_grid_of_differences_is_about_one_percent_fine() -> None:
    edges = LOG_RATIO_GRID.edges()[1:-1]
    widths = np.diff(edges) / edges[:-1]
    assert 0.007 < widths.min() < widths.max() < 0.016
    assert edges[0] < 1e-8
    assert edges[-1] > 100
    assert edges.size + 1 == LOG_RATIO_GRID.size


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_of_short_lengths_are_exact(lengths: list[int], fraction: float) -> None:
    (found,) = LengthStatistics.of(np.array(lengths)).quantiles((fraction,))
    assert found == np.quantile(lengths, fraction, method="inverted_cdf")


@settings(deadline=None)
@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_of_long_lengths_are_within_half_a_percent(lengths: list[int], fraction: float) -> None:
    (found,) = LengthStatistics.of(np.array(lengths)).quantiles((fraction,))
    assert found == pytest.approx(np.quantile(lengths, fraction, method="inverted_cdf"), rel=0.004)


def test_quantiles_of_differences_come_from_the_grid() -> None:
    batch = random_batch(0, 60, 200, 1e-5, 10.0)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    statistics = compared(batch).statistics
    d = np.subtract(batch.trainer_log_probs, batch.rollout_log_probs, dtype=np.float64)[batch.generated]
    measures = statistics.measures()
    for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        exact = np.quantile(np.abs(d), fraction, method="inverted_cdf")
        assert measures[f"{name}_abs_d"] == pytest.approx(exact, rel=0.008)
    ends = ComparisonStatistics.of([-1e-9, -1e-9, -500.0], [0.0, 0.0, 0.0], [0, 3]).measures()
    assert (ends["p50_abs_d"], ends["p99_abs_d"], ends["max_abs_d"]) == (0.0, 128.0, 500.0)


Columns = tuple[np.ndarray, list[np.ndarray]]


def random_columns(seed: int, tokens: int, vocabulary: int) -> Columns:
    """Return token ids and d, |d|, k3 of tokens, of which a few dominate."""
    generator = np.random.default_rng(seed)
    d = generator.standard_t(2, tokens) * np.exp(generator.uniform(-10, 0, tokens))
    return generator.zipf(1.2, tokens) % vocabulary, [d, np.abs(d), np.maximum(np.expm1(d) - d, 0)]


def sums_of(ids: np.ndarray, values: list[np.ndarray]) -> TokenIdSums:
    """Return the sums of a pass over tokens with these ids and values of d, |d| and k3."""
    found, places = np.unique(ids, return_inverse=True)
    sums = np.zeros((found.size, len(values)))
    for place, column in enumerate(values):
        sums[:, place] = np.bincount(places, column, found.size)
    return TokenIdSums(found.astype(np.int64), np.bincount(places, minlength=found.size), sums, np.zeros(found.size))


def parts_of(columns: Columns, cuts: list[int]) -> list[TokenIdSums]:
    ids, values = columns
    pieces = zip(np.split(ids, cuts), *(np.split(column, cuts) for column in values), strict=True)
    return [sums_of(of_ids, list(of_values)) for of_ids, *of_values in pieces]


def exact_k3(columns: Columns) -> dict[int, Fraction]:
    ids, (_, _, k3) = columns
    totals: dict[int, Fraction] = {}
    for token_id, value in zip(ids.tolist(), k3.tolist(), strict=True):
        totals[token_id] = totals.get(token_id, Fraction(0)) + Fraction(value)
    return totals


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 100_000),
    cuts=st.lists(st.integers(0, 400), max_size=6).map(sorted),
    limits=st.lists(st.integers(1, 30), min_size=7, max_size=7),
    order=st.randoms(use_true_random=False),
)
def test_true_sum_of_an_id_lies_within_its_bound(seed: int, cuts: list[int], limits: list[int], order: object) -> None:
    """Parts are cut before merging, and sometimes in between, as stored shards and steps are."""
    columns = random_columns(seed, 400, 60)
    parts = [part.kept(limit) for part, limit in zip(parts_of(columns, cuts), limits, strict=False)]
    order.shuffle(parts)  # type: ignore[attr-defined]
    merged = TokenIdSums.empty()
    for part, limit in zip(parts, limits, strict=False):
        merged = merged.merge(part)
        if limit > 20:
            merged = merged.kept(limit)
    missing = dict(zip(merged.ids.tolist(), merged.missing().tolist(), strict=True))
    sums = dict(zip(merged.ids.tolist(), merged.sums[:, 2].tolist(), strict=True))
    np.testing.assert_allclose(merged.missing(), merged.bound - merged.covered, rtol=0.0, atol=1e-12)
    for token_id, value in exact_k3(columns).items():
        low = sums.get(token_id, 0.0)
        high = low + missing.get(token_id, merged.bound)
        assert low * (1 - 1e-12) <= float(value) <= high * (1 + 1e-12)


def test_ids_with_the_largest_sums_are_kept_with_the_tightest_bound() -> None:
    ids = np.arange(100)
    k3 = np.random.default_rng(0).permutation(100).astype(np.float64) + 1.0
    whole = sums_of(ids, [k3, k3, k3])
    kept = whole.kept(10)
    assert sorted(kept.sums[:, 2].tolist()) == [float(value) for value in range(91, 101)]
    assert kept.bound == 90.0
    assert not kept.missing().any(), "what was kept is known exactly"
    assert kept.kept(10) is kept
    assert whole.kept(100) is whole
    other = sums_of(np.array([int(kept.ids[0]), 1000]), [np.ones(2)] * 3)
    merged = kept.merge(other)
    known = dict(zip(merged.ids.tolist(), merged.missing().tolist(), strict=True))
    assert known[int(kept.ids[0])] == 0.0
    assert known[1000] == 90.0, "the cut part may have had as much of it"


def test_table_begins_with_the_largest_sums() -> None:
    columns = random_columns(3, 5000, 1000)
    (sums,) = parts_of(columns, [])
    table = sums.table(20)
    exact = exact_k3(columns)
    largest = sorted(exact, key=lambda token_id: -exact[token_id])[:20]
    assert table.token_ids.tolist() == largest
    assert table.k3_sum.tolist() == pytest.approx([float(exact[token_id]) for token_id in largest], rel=1e-13)
    np.testing.assert_allclose(table.k3_kl * table.tokens, table.k3_sum, rtol=1e-15)
    assert table.k3_sum_unnamed == 0.0
    of_first = columns[0] == largest[0]
    assert table.tokens[0] == of_first.sum()
    assert table.mean_d[0] == pytest.approx(columns[1][0][of_first].mean(), rel=1e-12)
    assert table.mean_abs_d[0] == pytest.approx(columns[1][1][of_first].mean(), rel=1e-12)


def test_infinite_sums_leave_bounds_that_are_infinite_and_not_nan() -> None:
    k3 = np.array([math.inf, math.inf, 1.0])
    cut = sums_of(np.arange(3), [np.ones(3), np.ones(3), k3]).kept(1)
    assert cut.bound == math.inf
    assert not np.isnan(cut.merge(cut).missing()).any()
    assert cut.merge(cut).kept(1).bound == math.inf


def test_only_stored_sums_are_cut() -> None:
    batch = random_batch(0, 60, 60)
    batch.response_token_ids[:] = np.arange(batch.num_tokens)
    statistics = compared(batch).statistics
    assert statistics.token_ids.ids.size == statistics.tokens > KEPT_TOKEN_IDS
    stored = ComparisonStatistics.from_bytes(statistics.to_bytes())
    assert stored.token_ids.ids.size == KEPT_TOKEN_IDS
    cut_off = sorted(statistics.token_ids.sums[:, 2].tolist())[-KEPT_TOKEN_IDS - 1]
    assert stored.token_ids.bound == stored.token_id_table().k3_sum_unnamed == cut_off
    table = statistics.token_id_table(5)
    assert stored.token_id_table(5).token_ids.tolist() == table.token_ids.tolist()
