"""Single tokens of stored rollouts: the worst of a step, and one rollout."""

import io
import tempfile
from dataclasses import replace

import httpx
import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI

import foreshock.rollouts.parquet_files
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.database.tables import MeasurementStatistics
from foreshock_service.platform.settings import Settings
from tests.service.sending import Sender, make_batch, problem_of, start_run
from tests.service.stored import list_files


def test_one_rollout_is_shown_in_order_of_tokens(sender: Sender) -> None:
    batch = make_batch(seed=2)
    sender.put_shard(2, batch).raise_for_status()
    sample_id = batch.sample_ids[4]
    answer = sender.get("steps/2/tokens", sample_id=sample_id).json()
    start, end = batch.response_offsets[4:6]
    assert [item["token_id"] for item in answer["items"]] == batch.response_token_ids[start:end].tolist()
    assert [item["position"] for item in answer["items"]] == list(range(end - start))
    assert answer["prompt_token_ids"] == [4]
    assert answer["scorers"] == ["rollout", "trainer"]
    part = sender.read("steps/2/tokens", sample_id=sample_id, from_position=1, to_position=2)["items"]
    assert part == answer["items"][1:3]
    assert len(answer["items"]) > 3
    assert sender.read("steps/2/tokens", sample_id=sample_id, from_position=10_000)["items"] == []
    assert sender.get("steps/2/tokens", sample_id="nobody").status_code == 404
    assert sender.get("steps/2/tokens", comparison="no/such").status_code == 422
    assert sender.get("steps/2/tokens", comparison="nonsense").status_code == 422
    assert sender.get("steps/7/tokens").status_code == 404


def test_tokens_come_as_csv_and_parquet_too(sender: Sender, http: httpx.Client) -> None:
    sender.put_shard(2, make_batch(200, seed=2)).raise_for_status()
    plain = sender.get("steps/2/tokens", worst=9)
    parquet = http.get(plain.url, headers={"Accept": "application/vnd.apache.parquet"}).raise_for_status()
    csv = sender.get("steps/2/tokens", worst=9, format="csv").raise_for_status()
    assert csv.headers["content-type"].startswith("text/csv")
    items = plain.json()["items"]
    for table in (pq.read_table(io.BytesIO(parquet.content)), pyarrow.csv.read_csv(io.BytesIO(csv.content))):
        rows = table.to_pylist()
        for name in ("sample_id", "position", "token_id", "generated", "d"):
            assert [row[name] for row in rows] == [item[name] for item in items], name
        for row, item in zip(rows, items, strict=True):
            for scorer in ("rollout", "trainer"):
                assert row[f"log_prob.{scorer}"] == pytest.approx(item["log_probs"][scorer], abs=1e-6)
    again = http.get(plain.url, headers={"If-None-Match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.settings(max_answer_values=24)
def test_an_answer_beyond_the_cap_says_how_to_ask_for_less(sender: Sender) -> None:
    batch = make_batch(seed=2)
    sender.put_shard(2, batch).raise_for_status()
    assert batch.response_lengths[4] > 3
    answer = sender.get("steps/2/tokens", sample_id=batch.sample_ids[4])
    assert problem_of(answer) == (422, "answer-too-large")
    assert "from_position" in answer.json()["detail"]
    part = sender.get("steps/2/tokens", sample_id=batch.sample_ids[4], to_position=2).raise_for_status()
    assert len(part.json()["items"]) == 3


on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@on_sqlite
def test_rollouts_of_shards_are_one_file(
    http: httpx.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They are joined on the disk of the store: the system's folder may be in memory.
    monkeypatch.setattr(tempfile, "tempdir", "/not-there")
    run = start_run(http)
    plain = replace(make_batch(5, seed=1), reward=None)
    for shard, batch in enumerate((plain, make_batch(7, seed=2))):
        run.put_shard(3, batch, shard, 2).raise_for_status()
    answer = run.get("steps/3/rollouts").raise_for_status()
    table = pq.read_table(io.BytesIO(answer.content))
    assert answer.headers["content-disposition"] == 'attachment; filename="step_3.parquet"'
    assert table["sample_id"].to_pylist() == [*plain.sample_ids, *make_batch(7, seed=2).sample_ids]
    assert table["reward"].null_count == 5
    assert run.get("steps/4/rollouts").status_code == 404
    assert len(list_files(settings)) == 2


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
def test_worst_tokens_are_those_over_all(
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
def test_only_row_groups_that_may_hold_a_worst_token_are_read(http: httpx.Client, groups_read: list[int]) -> None:
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
def test_step_without_the_scores_is_answered_without_reading_its_tokens(sender: Sender, groups_read: list[int]) -> None:
    without = make_batch(ROLLOUTS, seed=0, rollout_log_probs=None, trainer_log_probs=None)
    sender.put_shard(1, without).raise_for_status()
    assert sender.get("steps/1/tokens", worst=5).status_code == 404
    assert groups_read == []
    sender.put_shard(2, make_batch(ROLLOUTS, seed=1)).raise_for_status()
    assert sender.get("steps/2/tokens", worst=5, comparison="torch.float32/rollout").status_code == 404
    assert len(groups_read) == 1
