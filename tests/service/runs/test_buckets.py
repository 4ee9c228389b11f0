"""Conditional maps over HTTP: each token is in the bucket of its condition, for any split into shards."""

import io

import httpx
import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.service.sending import Sender, log_probs_of, make_batch, start_run

Values = NDArray[np.float64]


@pytest.fixture
def batch() -> RolloutBatch:
    """Return rollouts with all columns that conditions use."""
    plain, random = make_batch(24, 5), np.random.default_rng(5)
    tokens = plain.num_tokens
    return make_batch(
        24,
        5,
        entropy=random.exponential(0.5, tokens).astype(np.float32),
        turn=np.concatenate([np.arange(length) // 3 for length in plain.response_lengths]).astype(np.int32),
        weights_version=random.integers(2, 7, tokens).astype(np.int32),
        attributes=BatchAttributes(trainer_weights_version=6),
    )


def differences(batch: RolloutBatch) -> Values:
    """Return d = log π − log μ, shape [T]."""
    behaviour, target = log_probs_of(batch)
    return np.subtract(target, behaviour, dtype=np.float64)


@pytest.fixture
def sender(http: httpx.Client, batch: RolloutBatch) -> Sender:
    """Start a run whose step 4 was cut into three shards."""
    sender = start_run(http)
    for shard, rows in enumerate(np.array_split(np.arange(batch.num_rollouts), 3)):
        sender.put_shard(4, batch.select(rows), shard, 3).raise_for_status()
    return sender


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
