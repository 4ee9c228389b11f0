"""Single tokens of stored rollouts: the worst of a step, and one rollout."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace

import httpx
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from foreshock_service.app import create_app
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.platform.settings import Settings
from tests.service.sending import make_batch, start_run
from tests.service.server import RunningServer
from tests.service.stored import list_files


def test_one_rollout_is_shown_in_order_of_tokens(http: httpx.Client) -> None:
    sender = start_run(http)
    batch = make_batch(seed=2)
    sender.put_shard(2, batch).raise_for_status()
    sample_id = batch.sample_ids[4]
    answer = sender.get("steps/2/tokens", sample_id=sample_id).json()
    start, end = batch.response_offsets[4:6]
    assert [item["token_id"] for item in answer["items"]] == batch.response_token_ids[start:end].tolist()
    assert [item["position"] for item in answer["items"]] == list(range(end - start))
    assert answer["prompt_token_ids"] == [4]
    assert answer["scorers"] == ["rollout", "trainer"]
    assert sender.get("steps/2/tokens", sample_id="nobody").status_code == 404
    assert sender.get("steps/2/tokens", comparison="no/such").status_code == 422
    assert sender.get("steps/2/tokens", comparison="nonsense").status_code == 422
    assert sender.get("steps/7/tokens").status_code == 404


def test_a_part_of_a_rollout_is_shown(http: httpx.Client) -> None:
    sender = start_run(http)
    batch = make_batch(seed=2)
    sender.put_shard(2, batch).raise_for_status()
    sample_id = batch.sample_ids[4]
    whole = sender.get("steps/2/tokens", sample_id=sample_id).json()["items"]
    part = sender.get("steps/2/tokens", sample_id=sample_id, from_position=1, to_position=2).json()["items"]
    assert len(whole) > 3
    assert part == whole[1:3]
    assert sender.get("steps/2/tokens", sample_id=sample_id, from_position=10_000).json()["items"] == []


def test_tokens_come_as_csv_and_parquet_too(http: httpx.Client) -> None:
    sender = start_run(http)
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


def test_an_answer_beyond_the_cap_says_how_to_ask_for_less(settings: Settings, decoders: DecoderPool) -> None:
    app = create_app(settings.model_copy(update={"max_answer_values": 24}), decoders)
    with RunningServer(app) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        sender, batch = start_run(http), make_batch(seed=2)
        sender.put_shard(2, batch).raise_for_status()
        assert batch.response_lengths[4] > 3
        answer = sender.get("steps/2/tokens", sample_id=batch.sample_ids[4])
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:foreshock:problem:answer-too-large")
        assert "from_position" in answer.json()["detail"]
        part = sender.get("steps/2/tokens", sample_id=batch.sample_ids[4], to_position=2).raise_for_status()
        assert len(part.json()["items"]) == 3


on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@on_sqlite
def test_rollouts_of_all_shards_are_one_file(
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
