"""Rollout summaries: sums per rollout, metadata, and the intervals that need rows."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from examples.tiny_rl.record import RECORDED
from foreshock.measures import RolloutSummaries
from foreshock.measures.estimators.bootstrap import bootstrap_interval, nonnegative_intervals
from foreshock.measures.registry import BOOTSTRAPPED, WITH_INTERVAL
from foreshock.rollouts import RolloutBatch, decode_rollouts
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.measures.clustered import k3_interval
from tests.foreshock.measures.direct import Token, k3, measured_sequences

TERMS: dict[str, Callable[[Token], float]] = {
    "sum_d": lambda token: token.d, "sum_abs_d": lambda token: abs(token.d),
    "sum_ratio_minus_one": lambda token: math.expm1(token.d), "sum_k3": lambda token: k3(token.d),
    "sum_chi2": lambda token: math.expm1(token.d) ** 2, "sum_tv": lambda token: max(-math.expm1(token.d), 0.0),
    "sum_abs_probability_difference": lambda token: token.gap,
}  # fmt: skip


@pytest.mark.parametrize("largest", [1e-5, 1.0, 30.0])
def test_sums_equal_those_of_the_tokens(largest: float) -> None:
    batch = random_batch(7, 20, 40, 1e-6, largest)
    rows = [row for row in compared(batch).summaries.table.to_pylist() if row["n_tokens"]]
    sequences, _ = measured_sequences(batch)
    for row, tokens in zip(rows, sequences, strict=True):
        for name, term in TERMS.items():
            scale = math.fsum(abs(term(token)) for token in tokens)
            exact = math.fsum(term(token) for token in tokens)
            assert row[name] == pytest.approx(exact, rel=1e-11, abs=1e-13 * scale), name
        assert row["min_d"] == min(token.d for token in tokens)
        assert row["max_d"] == max(token.d for token in tokens)


def test_what_was_not_logged_is_null() -> None:
    batch = dataclasses.replace(random_batch(1), advantage=None, reward=None, weights_version=None, group_ids=None)
    table = compared(batch).summaries.table
    for name in ("advantage", "reward", "lag", "group_id"):
        assert table.column(name).null_count == table.num_rows, name


def test_clusters_are_groups_and_rollouts_without_one() -> None:
    names = ["b", None, "a", "b", None, "a"]
    batch = dataclasses.replace(random_batch(2, 6), group_ids=names)
    clusters = compared(batch).summaries.clusters()
    assert np.unique(clusters).size == 4
    assert clusters[0] == clusters[3] != clusters[2] == clusters[5]
    order = [5, 3, 1, 0, 4, 2]
    np.testing.assert_array_equal(compared(batch.select(order)).summaries.clusters(), clusters[order])


def test_intervals_stay_within_the_range_of_the_measure() -> None:
    # One of eight rollouts has all of the mismatch.
    gaps = [[1.5, -0.5], *([[1e-6, -1e-6]] * 7)]
    comparison = compared(
        RolloutBatch.from_lists(
            [f"rollout-{row}" for row in range(8)], prompt_token_ids=[[1]] * 8, response_token_ids=[[2, 3]] * 8,
            rollout_log_probs=[[-2.0, -2.0]] * 8, trainer_log_probs=[[-2.0 + d for d in row] for row in gaps],
        )
    )  # fmt: skip
    measures, of_rows = comparison.measures(), k3_interval(comparison.summaries)
    assert (measures["k3_kl_low"], measures["k3_kl_high"]) == pytest.approx((of_rows.low, of_rows.high))
    for name in WITH_INTERVAL:
        low, high = measures[f"{name}_low"], measures[f"{name}_high"]
        assert low < measures[name] < high
        assert (low < 0.0) == (name == "kl")


def test_bootstrap_intervals_are_not_negative() -> None:
    # Ten tokens of eight prompts carry nearly all of the mismatch.
    batch = decode_rollouts((RECORDED / "rollouts/step_0160.parquet").read_bytes())
    summaries = compared(batch).summaries
    measures = summaries.bootstrap_measures()
    whole = bootstrap_interval(summaries.column("sum_k3"), summaries.column("n_tokens"), summaries.clusters())
    assert whole.low < 0.0 < whole.high <= measures["k3_kl_bootstrap_high"]
    assert measures["k3_kl_bootstrap_low"] == 0.0


def test_bootstrap_intervals_do_not_depend_on_row_order() -> None:
    batch = random_batch(3, 60, 60, 1e-4, 1.0)
    comparison = compared(batch)
    measures = comparison.measures()
    clusters = np.array([int(name.removeprefix("prompt-")) for name in batch.group_ids or [] if name])
    for name, column in zip(BOOTSTRAPPED, ("sum_k3", "sum_chi2", "sum_tv"), strict=True):
        summaries = comparison.summaries
        low, high = measures[f"{name}_bootstrap_low"], measures[f"{name}_bootstrap_high"]
        assert low < measures[name] < high
        # Groups are numbered by rising id.
        by_name = np.argsort(np.argsort([f"prompt-{index}" for index in range(15)]))[clusters]
        (expected,) = nonnegative_intervals(summaries.column(column)[:, None], summaries.column("n_tokens"), by_name)
        assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    parts = [compared(batch.select(rows)).summaries for rows in (range(40, 60), range(20), range(20, 40))]
    again = RolloutSummaries.concat(parts).bootstrap_measures()
    assert again == {name: measures[name] for name in again}


def test_bootstrap_measures_are_nan_without_rows() -> None:
    comparison = compared(random_batch(3, 60))
    alone = comparison.statistics.measures()
    missing = {name for name in alone if "_bootstrap_" in name}
    assert missing == set(comparison.summaries.bootstrap_measures())
    assert all(math.isnan(alone[name]) for name in missing)
    assert alone.keys() == comparison.measures().keys()
