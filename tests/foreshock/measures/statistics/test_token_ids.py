"""Sums by token id: independence of the order of merging, and bounds of what cuts drop."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.measures import ComparisonStatistics
from foreshock.measures.statistics.token_ids import KEPT_TOKEN_IDS, TokenIdSums
from tests.foreshock.batches import compared, random_batch

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
def test_true_sum_of_every_id_lies_within_its_bound(
    seed: int, cuts: list[int], limits: list[int], order: object
) -> None:
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
