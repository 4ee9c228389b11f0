"""Bucket tables: fixed edges, one bucket per token, and means that combine to the whole."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from foreshock.measures import BUCKET_EDGES, CONDITIONS, ComparisonStatistics, compare
from foreshock.measures.statistics.conditions import POSITION_EDGES, position_buckets, probability_buckets
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch


def test_edges_are_half_decades_from_1e_8_to_1() -> None:
    assert BUCKET_EDGES[0] == 0.0
    assert BUCKET_EDGES[1] == pytest.approx(1e-8)
    assert BUCKET_EDGES[-1] == 1.0
    np.testing.assert_allclose(np.diff(np.log10(BUCKET_EDGES[1:])), 0.5, rtol=1e-12)


@pytest.mark.parametrize(
    ("log_prob", "edges"),
    [(0.0, (10**-0.5, 1.0)), (5e-5, (10**-0.5, 1.0)), (math.log(0.2), (0.1, 10**-0.5)), (-100.0, (0.0, 1e-8)),
     (math.log(2e-8), (1e-8, 10**-7.5))],
)  # fmt: skip
def test_token_is_in_the_bucket_of_its_probability(log_prob: float, edges: tuple[float, float]) -> None:
    index = int(probability_buckets(np.array([log_prob]))[0])
    assert BUCKET_EDGES[index : index + 2] == pytest.approx(edges)


def test_tokens_of_low_probability_are_those_of_the_buckets_below_a_tenth() -> None:
    log_mu = np.log([0.5, 0.1, 0.0999, 0.02, 1e-12])
    d = np.array([0.5, 0.25, -0.1, 0.3, -0.2])
    offsets = [0, 5]
    found = ComparisonStatistics.of(log_mu + d, log_mu, offsets).measures()
    assert found["low_probability_tokens"] == 3
    assert found["low_probability_abs_d"] == pytest.approx(0.2, rel=1e-12)


def test_without_tokens_of_low_probability_their_mean_is_undefined() -> None:
    found = ComparisonStatistics.of([-0.2, -0.3], [-0.1, -0.1], [0, 2]).measures()
    assert found["low_probability_tokens"] == 0
    assert math.isnan(found["low_probability_abs_d"])


def test_positions_are_in_buckets_of_powers_of_two() -> None:
    places = np.array([0, 1, 2, 3, 6, 7, 1000, 2**40])
    found = position_buckets(places)
    for place, index in zip(places[:-1], found[:-1], strict=True):
        assert POSITION_EDGES[index] <= place < POSITION_EDGES[index + 1]
    assert found[-1] == len(POSITION_EDGES) - 2


@pytest.mark.parametrize("by", sorted(CONDITIONS))
def test_buckets_combine_to_the_whole(by: str) -> None:
    batch = random_batch(2, 30, 50, 1e-6, 5.0)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    statistics = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).statistics
    table = statistics.condition_table(by)
    measures = statistics.measures()
    share = table.tokens / table.tokens.sum()
    filled = table.tokens > 0
    for column, measure in (("k3_kl", "k3_kl"), ("mean_abs_d", "mean_abs_d"),
                            ("mean_abs_probability_difference", "rollout_probs_diff_mean")):  # fmt: skip
        total = float((share[filled] * getattr(table, column)[filled]).sum())
        assert total == pytest.approx(measures[measure], rel=1e-12)
    assert float((share[filled] * table.mean_d[filled]).sum()) == pytest.approx(-measures["kl"], rel=1e-9)
    assert np.nanmax(table.max_abs_d) == measures["max_abs_d"]
    assert len(table.edges) == len(table.tokens) + 1


def test_buckets_are_the_table_by_probability() -> None:
    batch = random_batch(2)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    statistics = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).statistics
    assert statistics.buckets().columns() == statistics.condition_table("probability").columns()
    assert statistics.buckets().edges.tolist() == list(BUCKET_EDGES)


def test_bucket_means_equal_those_of_its_tokens_and_empty_buckets_are_null() -> None:
    batch = RolloutBatch.from_lists(
        ["a"], [[1]], [[1, 2, 3]], rollout_log_probs=[[-0.1, -3.0, -3.1]], trainer_log_probs=[[-0.1, -3.5, -3.0]]
    )
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    table = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).statistics.buckets()
    index = int(probability_buckets(np.array([-3.0]))[0])
    d = np.array([-0.5, 0.1])
    assert table.tokens[index] == 2
    assert table.mean_d[index] == pytest.approx(d.mean(), rel=1e-6)
    assert table.k3_kl[index] == pytest.approx((np.expm1(d) - d).mean(), rel=1e-5)
    columns = json.loads(json.dumps(table.columns()))
    assert columns["mean_abs_d"][0] is None
    assert set(columns) == {
        "tokens", "mean_abs_d", "mean_d", "k3_kl", "max_abs_d", "mean_abs_probability_difference"
    }  # fmt: skip
