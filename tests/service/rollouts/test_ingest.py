"""An uploaded shard is stored once, measured exactly, and answers the same when it comes again."""

from __future__ import annotations

import httpx

from tests.service.sending import make_batch, start_run


def test_a_step_of_one_shard_is_stored_measured_and_closed(http: httpx.Client) -> None:
    sender = start_run(http)
    batch = make_batch()
    answer = sender.put_shard(3, batch)
    assert answer.status_code == 201, answer.text
    assert answer.json()["step_closed"] is True
    assert sender.put_shard(3, batch).json()["status"] == "duplicate"
    measured = sender.get("measurements", comparison="trainer/rollout", measure=["k3_kl", "tokens"])
    assert measured.status_code == 200, measured.text
    assert measured.json()["columns"]["tokens"] == [batch.num_tokens]
