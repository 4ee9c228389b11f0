"""Tests of `Client(mode="statistics")` with the real service: the measures of full logging, through restarts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock import Client, RolloutBatch
from foreshock.client.capture import capture_rollouts, encode_shard
from foreshock.client.deliveries import Registration
from foreshock.client.reporting import LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.statistics_shards import StatisticsShard
from tests.foreshock.batches import random_batch
from tests.foreshock.client.trainer import clients, get
from tests.foreshock.running_service import RunningService


@pytest.fixture
def make(
    real_service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Client]]:
    # The compiled pass is tested with the passes; compiling takes half a minute of a first run.
    monkeypatch.setattr("foreshock.client.capture.prepare_token_pass", lambda: True)
    with clients(real_service.url, tmp_path / "spool", attempt_key="one", strict=True) as make_client:
        yield make_client


def ranks_of(batch: RolloutBatch, shards: int) -> list[RolloutBatch]:
    return [batch.select(range(shard, batch.num_rollouts, shards)) for shard in range(shards)]


def columns_of(client: Client) -> dict[str, Any]:
    columns: dict[str, Any] = get(client, "/measurements")["columns"]
    return columns


def assert_same_columns(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values[0], str):
            assert found[name] == values
        else:
            one, other = (np.array(each, dtype=np.float64) for each in (found[name], values))
            np.testing.assert_allclose(one, other, rtol=1e-7, err_msg=name)


def test_measures_are_those_of_full_logging_over_ranks(make: Callable[..., Client]) -> None:
    few = {"mode": "statistics", "full_rollouts": 8, "worst_rollouts": 2}
    full, sums = make("full"), make("sums", **few)
    for client in (full, sums):
        client.start_run(length_cap=40)
    for step in range(2):
        for shard, rank in enumerate(ranks_of(random_batch(step, 80), 4)):
            for client in (full, sums):
                client.log_rollouts(step, rank, shard=shard, shards=4)
    assert full.flush(120)
    assert sums.flush(120)
    assert_same_columns(columns_of(sums), columns_of(full))
    assert sums.counters.delivered_bytes > 0


def test_logging_the_same_shard_again_is_a_duplicate(make: Callable[..., Client]) -> None:
    client = make("again", mode="statistics", full_rollouts=4)
    batch = random_batch(3, 40)
    client.log_rollouts(0, batch)
    client.log_rollouts(0, batch)
    assert client.flush(120)
    assert (client.counters.duplicates, client.counters.rejected) == (1, 0)
    step = get(client, "/steps")["items"][0]
    assert (step["shards"], step["rollouts"], step["tokens"]) == (1, 40, batch.num_tokens)


def test_the_sample_is_of_run_step_and_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.client.capture.prepare_token_pass", lambda: True)
    one = Registration({"project": "project", "key": "key"}, {"key": "attempt"})
    other = Registration({"project": "project", "key": "another"}, {"key": "attempt"})
    captured = capture_rollouts(random_batch(6, 60), default_ids="r", attributes=None)
    settings = ClientSettings.resolve(mode="statistics", full_rollouts=6, worst_rollouts=0)

    def sample(*arguments: Any) -> bytes | memoryview:
        registered, step, shard, shards = arguments
        delivery = encode_shard(captured, registered, step, (shard, shards), settings, LogOnce("test"))
        return StatisticsShard.from_bytes(bytes(delivery.body)).full

    assert sample(one, 1, 0, 1) == sample(one, 1, 0, 1)
    assert len({bytes(sample(*address)) for address in ((one, 1, 0, 1), (one, 2, 0, 1), (other, 1, 0, 1))}) == 3
