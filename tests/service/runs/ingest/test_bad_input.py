"""Invalid shards: refused with a problem that names row and column; nothing is stored."""

import io
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock.rollouts.schema import DecodeLimits
from foreshock_service.platform.settings import Settings
from tests.service.sending import Sender, make_batch, start_run
from tests.service.stored import count_rows, list_files


def parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@pytest.fixture
def sender(http: httpx.Client) -> Sender:
    return start_run(http)


def assert_refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Assert a refusal and return its problem document."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["type"].startswith("urn:foreshock:problem:")
    assert document["title"]
    assert document["detail"]
    return document


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_invalid_shard_is_refused_by_row_and_column(sender: Sender, settings: Settings) -> None:
    before = count_rows(settings)
    ids = {"sample_id": ["a", "b"], "prompt_token_ids": [[1], [1]], "response_token_ids": [[3, 4], [5]]}
    for body, row, column in (
        (parquet(ids | {"rollout_log_probs": [[-0.1, -0.2], [-0.3, -0.4]]}), 1, "rollout_log_probs"),
        (parquet({name: ids[name] for name in ("sample_id", "prompt_token_ids")}), None, "response_token_ids"),
        (b"this is not a table", None, None),
        (b"", None, None),
    ):
        document = assert_refused(sender.put_shard(0, body), 422)
        assert (document.get("row"), document.get("column")) == (row, column), document
    assert count_rows(settings) == before
    assert list_files(settings) == []


def test_ten_times_the_body_cap_is_refused_before_it_is_read(sender: Sender, settings: Settings) -> None:
    body = bytes(10 * settings.max_body_bytes)
    document = assert_refused(sender.put_shard(0, body), 413)
    assert f"{settings.max_body_bytes:,}" in document["detail"]
    assert list_files(settings) == []


def test_body_without_length_is_refused_at_cap(sender: Sender, settings: Settings) -> None:
    def chunks() -> Any:
        for _ in range(3 * settings.max_body_bytes // 65_536):
            yield bytes(65_536)

    answer = sender.http.put(
        f"/v1/runs/{sender.run}/steps/0/rollouts/0",
        content=chunks(),
        headers={"Content-Type": "application/vnd.apache.parquet"},
    )
    assert_refused(answer, 413)
    assert list_files(settings) == []


def test_a_small_body_that_decodes_to_ten_times_the_cap_is_refused(sender: Sender, settings: Settings) -> None:
    rows = 10 * DecodeLimits().max_rollouts
    lists = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), pa.array(np.zeros(rows, np.int32)))
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["same"]))
    body = parquet({"sample_id": names, "prompt_token_ids": lists, "response_token_ids": lists})
    assert len(body) < settings.max_body_bytes
    document = assert_refused(sender.put_shard(0, body), 413)
    assert f"{DecodeLimits().max_rollouts:,}" in document["detail"]
    assert list_files(settings) == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_another_content_type_is_refused(sender: Sender, settings: Settings) -> None:
    for media_type in ("application/json", "application/octet-stream", "text/plain"):
        answer = sender.put_shard(0, encode_rollouts(make_batch()), media_type=media_type)
        assert "application/vnd.apache.parquet" in assert_refused(answer, 415)["detail"]
    assert list_files(settings) == []


def test_json_beyond_its_cap_is_refused(sender: Sender, settings: Settings) -> None:
    values: dict[str, float | None] = {f"name {number:06d}": 0.5 for number in range(settings.max_json_bytes // 10)}
    assert_refused(sender.put_scalars(0, values), 413)
    assert "scalars" not in count_rows(settings)
