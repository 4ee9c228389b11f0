"""Conditional maps over HTTP: each token is in the bucket of its condition, for any split into shards."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.service.sending import Sender, make_batch, start_run

Values = NDArray[np.float64]


def full_batch(rollouts: int = 24, seed: int = 5) -> RolloutBatch:
    """Return rollouts with all columns that conditions use."""
    plain = make_batch(rollouts, seed)
    random = np.random.default_rng(seed)
    tokens = plain.num_tokens
    return make_batch(
        rollouts,
        seed,
        entropy=random.exponential(0.5, tokens).astype(np.float32),
        turn=np.concatenate([np.arange(length) // 3 for length in plain.response_lengths]).astype(np.int32),
        weights_version=random.integers(2, 7, tokens).astype(np.int32),
        attributes=BatchAttributes(trainer_weights_version=6),
    )


def place_in_response(batch: RolloutBatch) -> Values:
    """Return the number of tokens before each token in its response, shape [T]."""
    return np.concatenate([np.arange(length, dtype=np.float64) for length in batch.response_lengths])


def column(batch: RolloutBatch, name: str) -> Values:
    """Return a column of tokens as float64, shape [T]."""
    return np.asarray(getattr(batch, name), np.float64)


CONDITIONS: dict[str, Callable[[RolloutBatch], Any]] = {
    "probability": lambda batch: np.exp(column(batch, "rollout_log_probs")),
    "position": place_in_response,
    "turn": lambda batch: column(batch, "turn"),
    "length": lambda batch: np.repeat(batch.response_lengths, batch.response_lengths).astype(np.float64),
    "entropy": lambda batch: column(batch, "entropy"),
    "lag": lambda batch: 6.0 - column(batch, "weights_version"),
}


def differences(batch: RolloutBatch) -> Values:
    """Return d = log π − log μ, shape [T]."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    return np.subtract(batch.trainer_log_probs, batch.rollout_log_probs, dtype=np.float64)


@pytest.fixture
def batch() -> RolloutBatch:
    """Return the batch of the step."""
    return full_batch()


@pytest.fixture
def sender(http: httpx.Client, batch: RolloutBatch) -> Sender:
    """Start a run whose step 4 was cut into three shards."""
    sender = start_run(http)
    for shard, rows in enumerate(np.array_split(np.arange(batch.num_rollouts), 3)):
        sender.put_shard(4, batch.select(rows), shard, 3).raise_for_status()
    return sender


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", list(CONDITIONS))
def test_each_token_is_in_the_bucket_of_its_condition(sender: Sender, batch: RolloutBatch, name: str) -> None:
    answer = sender.get("steps/4/buckets", by=name).raise_for_status().json()
    assert answer["by"] == name
    assert {"meaning", "unit", "edges", "columns"} < set(answer)
    lows = [-math.inf if edge is None else edge for edge in answer["edges"][:-1]]
    highs = [*lows[1:], math.inf]
    value, d = CONDITIONS[name](batch), differences(batch)
    k3 = np.expm1(d) - d
    columns = answer["columns"]
    assert sum(columns["tokens"]) == batch.num_tokens
    for index, (low, high) in enumerate(zip(lows, highs, strict=True)):
        inside = (value >= low) & (value < high) if index else value < high
        assert columns["tokens"][index] == inside.sum(), (low, high)
        if not inside.any():
            assert columns["k3_kl"][index] is None
            continue
        assert columns["mean_d"][index] == pytest.approx(d[inside].mean(), rel=1e-9)
        assert columns["mean_abs_d"][index] == pytest.approx(np.abs(d[inside]).mean(), rel=1e-9)
        assert columns["max_abs_d"][index] == np.abs(d[inside]).max()
        assert columns["k3_kl"][index] == pytest.approx(k3[inside].mean(), rel=1e-9)


def test_token_ids_are_ordered_by_mismatch(sender: Sender, batch: RolloutBatch) -> None:
    answer = sender.get("steps/4/buckets", by="token_id").raise_for_status().json()
    columns, d = answer["columns"], differences(batch)
    k3 = np.expm1(d) - d
    assert set(columns["token_id"]) == set(batch.response_token_ids.tolist())
    assert columns["k3_sum"] == sorted(columns["k3_sum"], reverse=True)
    for index, token_id in enumerate(columns["token_id"]):
        inside = batch.response_token_ids == token_id
        assert columns["tokens"][index] == inside.sum()
        assert columns["mean_d"][index] == pytest.approx(d[inside].mean(), rel=1e-9)
        assert columns["k3_kl"][index] == pytest.approx(k3[inside].mean(), rel=1e-9)
        assert columns["k3_sum"][index] == pytest.approx(k3[inside].sum(), rel=1e-9)
    # Fewer than 512 ids: nothing was cut.
    assert answer["k3_sum_unnamed"] == 0
    assert set(columns["k3_sum_missing"]) == {0}
    fewer = sender.get("steps/4/buckets", by="token_id", limit=3).json()["columns"]
    assert fewer["token_id"] == columns["token_id"][:3]


@pytest.mark.parametrize("by", ["probability", "token_id"])
def test_buckets_come_as_csv_and_parquet_too(sender: Sender, by: str) -> None:
    answer = sender.get("steps/4/buckets", by=by).raise_for_status().json()
    expected = answer["columns"]
    if by == "probability":
        expected = {"low": answer["edges"][:-1], "high": answer["edges"][1:], **expected}
    parquet = pq.read_table(io.BytesIO(sender.get("steps/4/buckets", by=by, format="parquet").content))
    assert parquet.to_pydict() == expected
    csv = pyarrow.csv.read_csv(io.BytesIO(sender.get("steps/4/buckets", by=by, format="csv").content))
    assert csv.column_names == list(expected)
    assert csv.column("tokens").to_pylist() == expected["tokens"]


def test_omitted_k3_sum_is_bounded(http: httpx.Client) -> None:
    sender = start_run(http)
    tokens = 6000
    random = np.random.default_rng(1)
    behaviour = -random.exponential(1.0, tokens).astype(np.float32)
    batch = make_batch(
        1,
        response_token_ids=random.integers(0, 4000, tokens).astype(np.int32),
        response_offsets=[0, tokens],
        rollout_log_probs=behaviour,
        trainer_log_probs=np.minimum(behaviour + random.normal(0, 0.1, tokens), 0).astype(np.float32),
        group_ids=["one"],
        reward=[1.0],
        finish_reasons=["stop"],
    )
    sender.put_shard(4, batch).raise_for_status()
    answer = sender.get("steps/4/buckets", by="token_id").json()
    d = differences(batch)
    whole = np.bincount(batch.response_token_ids, weights=np.expm1(d) - d)
    named = answer["columns"]["token_id"]
    assert len(named) == 512
    assert sorted(whole, reverse=True)[:512] == pytest.approx(answer["columns"]["k3_sum"], rel=1e-9)
    assert np.delete(whole, named).max() <= answer["k3_sum_unnamed"] <= min(answer["columns"]["k3_sum"]) * (1 + 1e-9)


def test_unlogged_condition_has_empty_buckets(http: httpx.Client) -> None:
    sender = start_run(http)
    sender.put_shard(4, make_batch()).raise_for_status()
    for name in ("turn", "entropy", "lag"):
        columns = sender.get("steps/4/buckets", by=name).raise_for_status().json()["columns"]
        assert set(columns["tokens"]) == {0}
        assert set(columns["k3_kl"]) == {None}
        figure = http.get(f"/pages/runs/{sender.run}/steps/4/figures/buckets-{name}.json").json()
        assert "These rollouts" in figure["missing"]


def test_unknown_condition_limit_or_step_is_refused(sender: Sender) -> None:
    assert sender.get("steps/4/buckets", by="colour").status_code == 422
    assert sender.get("steps/4/buckets", by="token_id", limit=513).status_code == 422
    assert sender.get("steps/5/buckets", by="lag").status_code == 404
