"""The worst tokens of a step with many row groups: the same ones as a search over all, from as few as are needed."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

import foreshock.rollouts.parquet_files
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.database.tables import MeasurementStatistics
from tests.service.sending import Sender, make_batch, start_run

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
SHARDS, ROLLOUTS = 2, 320


@pytest.fixture
def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the row groups whose tokens were read, as they are read."""
    read: list[int] = []
    file = foreshock.rollouts.parquet_files.RolloutFile
    original = file.read

    def noted(self: foreshock.rollouts.parquet_files.RolloutFile, group: int) -> RolloutBatch:
        read.append(group)
        return original(self, group)

    monkeypatch.setattr(file, "read", noted)
    return read


def shard_of(shard: int, difference: np.ndarray[tuple[int], np.dtype[np.float64]]) -> RolloutBatch:
    """Return a shard of rollouts with these d, in units of 2⁻¹⁰, so that they are exact."""
    behaviour = np.full(difference.size, -8.0, dtype=np.float32)
    target = (behaviour + difference / 1024).astype(np.float32)
    return make_batch(
        ROLLOUTS, seed=0, rollout_log_probs=behaviour, trainer_log_probs=target,
        sample_ids=[f"{shard}-{row}" for row in range(ROLLOUTS)],
    )  # fmt: skip


def send(http: httpx.Client, sizes: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Sender:
    sender = start_run(http)
    for shard in range(SHARDS):
        sender.put_shard(1, shard_of(shard, sizes[shard]), shard, SHARDS).raise_for_status()
    return sender


def places(sender: Sender, worst: int) -> list[tuple[int, str, int]]:
    items = sender.get("steps/1/tokens", worst=worst).json()["items"]
    return [(item["shard"], item["sample_id"], item["position"]) for item in items]


def expected_places(sizes: np.ndarray[tuple[int, int], np.dtype[np.float64]], worst: int) -> list[tuple[int, str, int]]:
    offsets = make_batch(ROLLOUTS, seed=0).response_offsets
    found = []
    for flat in np.argsort(-np.abs(sizes.ravel()), kind="stable")[:worst]:
        shard, token = divmod(int(flat), sizes.shape[1])
        row = int(np.searchsorted(offsets, token, side="right")) - 1
        found.append((shard, f"{shard}-{row}", token - int(offsets[row])))
    return found


@on_sqlite
@pytest.mark.parametrize("largest", [3, 2000], ids=["with many ties", "with few ties"])
def test_worst_tokens_are_those_of_a_search_over_all(
    http: httpx.Client, app: FastAPI, groups_read: list[int], largest: int
) -> None:
    tokens = make_batch(ROLLOUTS, seed=0).num_tokens
    sizes = np.random.default_rng(largest).integers(-largest, largest + 1, (SHARDS, tokens)).astype(np.float64)
    sender = send(http, sizes)
    for worst in (1, 20, 1000):
        assert places(sender, worst) == expected_places(sizes, worst)
    # Without summaries every row group is read, with the same result.
    app.state.context.database.write(lambda session: session.query(MeasurementStatistics).delete())
    groups_read.clear()
    assert places(sender, 20) == expected_places(sizes, 20)
    assert len(groups_read) == SHARDS * ROLLOUTS // 64


@on_sqlite
def test_only_row_groups_that_may_hold_one_of_the_worst_tokens_are_read(
    http: httpx.Client, groups_read: list[int]
) -> None:
    batch = make_batch(ROLLOUTS, seed=0)
    sizes = np.ones((SHARDS, batch.num_tokens))
    # Five tokens of one rollout in the fourth row group of the second shard.
    begin = int(batch.response_offsets[200])
    count = min(5, int(batch.response_lengths[200]))
    sizes[1, begin : begin + count] = 100.0
    sender = send(http, sizes)
    assert places(sender, count) == expected_places(sizes, count)
    assert groups_read == [3]


@on_sqlite
def test_step_without_the_scores_is_answered_without_reading_its_tokens(
    http: httpx.Client, groups_read: list[int]
) -> None:
    sender = start_run(http)
    without = make_batch(ROLLOUTS, seed=0, rollout_log_probs=None, trainer_log_probs=None)
    sender.put_shard(1, without).raise_for_status()
    assert sender.get("steps/1/tokens", worst=5).status_code == 404
    assert groups_read == []
    sender.put_shard(2, make_batch(ROLLOUTS, seed=1)).raise_for_status()
    assert sender.get("steps/2/tokens", worst=5, comparison="torch.float32/rollout").status_code == 404
    assert len(groups_read) == 1
