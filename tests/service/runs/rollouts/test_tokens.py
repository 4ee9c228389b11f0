"""Single tokens of stored rollouts: the worst of a step, and one rollout."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from tests.service.sending import make_batch, start_run


def difference_of(batch: RolloutBatch) -> NDArray[np.float64]:
    """Return d = log π − log μ, shape [T]."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    return np.subtract(batch.trainer_log_probs, batch.rollout_log_probs, dtype=np.float64)


def test_worst_tokens_come_first(http: httpx.Client) -> None:
    sender = start_run(http)
    parts = [make_batch(20, seed=seed) for seed in range(3)]
    for shard, part in enumerate(parts):
        sender.put_shard(0, part, shard, 3).raise_for_status()
    items = sender.get("steps/0/tokens", worst=7).json()["items"]
    differences = np.concatenate([difference_of(part) for part in parts])
    expected = np.sort(np.abs(differences))[::-1][:7]
    assert [abs(item["d"]) for item in items] == expected.tolist()
    for item in items:
        assert item["log_probs"]["trainer"] - item["log_probs"]["rollout"] == pytest.approx(item["d"])
        part = parts[item["shard"]]
        start = part.response_offsets[part.sample_ids.index(item["sample_id"])]
        assert part.response_token_ids[start + item["position"]] == item["token_id"]


def test_equal_differences_are_shown_in_order_of_tokens(http: httpx.Client) -> None:
    sender = start_run(http)
    batch = make_batch(30)
    assert batch.rollout_log_probs is not None
    alike = make_batch(
        30, rollout_log_probs=np.full(batch.num_tokens, -1.0), trainer_log_probs=np.full(batch.num_tokens, -1.5)
    )
    sender.put_shard(0, alike).raise_for_status()
    for worst in (1, 7, batch.num_tokens, 1000):
        items = sender.get("steps/0/tokens", worst=worst).json()["items"]
        places = [(item["sample_id"], item["position"]) for item in items]
        assert places == token_positions(batch)[:worst]


def token_positions(batch: RolloutBatch) -> list[tuple[str, int]]:
    """Return every token as (sample id, position), in order."""
    lengths = zip(batch.sample_ids, batch.response_lengths.tolist(), strict=True)
    return [(sample_id, position) for sample_id, length in lengths for position in range(length)]


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
