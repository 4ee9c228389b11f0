"""Upload of shards: each is stored once, and its step closes with its last shard."""

from concurrent.futures import ThreadPoolExecutor

import httpx

from foreshock.digests import digest_of_bytes
from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.settings import Settings
from tests.service.sending import Sender, make_batch, start_run
from tests.service.stored import count_rows, list_files


def test_same_bytes_again_are_a_duplicate(sender: Sender, settings: Settings) -> None:
    batch = make_batch()
    body = encode_rollouts(batch)
    receipt = {
        "status": "stored", "digest": digest_of_bytes(body), "rollouts": batch.num_rollouts,
        "tokens": batch.num_tokens, "full_rollouts": batch.num_rollouts,
    }  # fmt: skip
    first, again = sender.put_shard(3, body), sender.put_shard(3, body)
    assert (first.status_code, first.json()) == (201, receipt)
    assert (again.status_code, again.json()) == (200, receipt | {"status": "duplicate"})
    assert count_rows(settings)["shards"] == 1
    assert len(list_files(settings)) == 1
    assert sender.http.get(f"/v1/runs/{sender.run}").json()["last_step"] == 3


def test_same_shard_from_eight_threads_is_stored_once(sender: Sender, settings: Settings) -> None:
    body = encode_rollouts(make_batch(200))
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: sender.put_shard(0, body, shards=2), range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert count_rows(settings)["shards"] == 1
    assert len(list_files(settings)) == 1
    steps = sender.get("steps").json()["items"]
    assert [(step["shards"], step["rollouts"]) for step in steps] == [(1, 200)]


def test_concurrent_shards_close_step_once_in_any_order(http: httpx.Client) -> None:
    whole, split = start_run(http, "whole"), start_run(http, "split")
    parts = [make_batch(seed=seed) for seed in range(6)]
    for shard, part in enumerate(parts):
        whole.put_shard(0, part, shard, 6).raise_for_status()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda shard: split.put_shard(0, parts[shard], shard, 6), reversed(range(6))))
    first, second = (sender.get("measurements").json()["columns"] for sender in (whole, split))
    assert first == second
    assert first["tokens"][1] == sum(part.num_tokens for part in parts)


def test_conflicting_shard_counts_are_refused(sender: Sender, settings: Settings) -> None:
    sender.put_shard(0, make_batch(seed=1), 0, 2).raise_for_status()
    before = list_files(settings)
    answer = sender.put_shard(0, make_batch(seed=2), 1, 3)
    assert answer.status_code == 409
    assert "shards=2" in answer.json()["detail"]
    assert sender.put_shard(0, make_batch(seed=2), 2, 2).status_code == 422
    assert list_files(settings) == before


def test_missing_attempt_is_refused_by_name(http: httpx.Client) -> None:
    run = http.post("/v1/runs", json={"key": "bare"}).json()["id"]
    answer = http.put(
        f"/v1/runs/{run}/steps/0/rollouts/0",
        content=encode_rollouts(make_batch()),
        headers={"Content-Type": "application/vnd.apache.parquet"},
    )
    assert answer.status_code == 404
    assert "no attempt 1" in answer.json()["detail"]
