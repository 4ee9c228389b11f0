"""Requests of the tests: small batches of rollouts, and the calls that set up a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import BatchAttributes, RolloutBatch, encode_rollouts
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS
from foreshock.statistics_shards import FullRollouts, encode_statistics_shard

_FEW = FullRollouts(2, 1)
PARQUET = "application/vnd.apache.parquet"


def make_batch(rollouts: int = 6, seed: int = 0, prefix: str = "sample", **columns: Any) -> RolloutBatch:
    """Return rollouts of 1 to 12 tokens, two per prompt group, with both log-probs; `columns` override."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 13, rollouts)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    behaviour = -random.exponential(1.0, offsets[-1]).astype(np.float32)
    target = np.minimum(behaviour + random.normal(0, 0.05, offsets[-1]), 0.0).astype(np.float32)
    values: dict[str, Any] = {
        "sample_ids": [f"{prefix}-{seed}-{number}" for number in range(rollouts)],
        "prompt_token_ids": np.arange(rollouts, dtype=np.int32),
        "prompt_offsets": np.arange(rollouts + 1),
        "response_token_ids": random.integers(0, 16, offsets[-1]).astype(np.int32),
        "response_offsets": offsets,
        "rollout_log_probs": behaviour,
        "trainer_log_probs": target,
        "group_ids": [f"group-{number // 2}" for number in range(rollouts)],
        "reward": random.integers(0, 2, rollouts).astype(np.float32),
        "finish_reasons": ["stop"] * rollouts,
    }
    return RolloutBatch.from_arrays(**(values | columns))


def make_mixed_batch(step: int) -> RolloutBatch:
    """Return rollouts of which a quarter of the tokens is at lag 0, with a small k3, the others at lag 8, with a large
    one."""
    batch, random = make_batch(160, seed=step), np.random.default_rng(step)
    assert batch.rollout_log_probs is not None
    is_stale = np.arange(batch.num_tokens) % 4 != 0
    moved = np.where(is_stale, 0.4, 0.02) * random.choice([-1.0, 1.0], batch.num_tokens)
    return make_batch(
        160,
        seed=step,
        trainer_log_probs=np.minimum(batch.rollout_log_probs + moved, 0.0).astype(np.float32),
        weights_version=np.where(is_stale, step - 8, step).astype(np.int32),
        attributes=BatchAttributes(trainer_weights_version=step),
    )


def log_probs_of(batch: RolloutBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return log μ and log π of a batch that has both, [T] each."""
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    return batch.rollout_log_probs, batch.trainer_log_probs


def copied(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch of a trainer in bypass mode."""
    return replace(batch, trainer_log_probs=log_probs_of(batch)[0].copy())


@dataclass(frozen=True, slots=True)
class Sender:
    """Client of one attempt of one run."""

    http: httpx.Client
    run: str
    attempt: int = 1

    def put_shard(
        self, step: int, body: bytes | RolloutBatch, shard: int = 0, shards: int = 1, media_type: str = PARQUET
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else encode_rollouts(body)
        return self.http.put(
            f"/v1/runs/{self.run}/steps/{step}/rollouts/{shard}",
            params={"attempt": self.attempt, "shards": shards},
            content=content,
            headers={"Content-Type": media_type},
        )

    def put_steps(self, steps: Iterable[int], rollouts: int = 6) -> None:
        """Upload each step in one shard, with its number as the seed."""
        for step in steps:
            self.put_shard(step, make_batch(rollouts, step)).raise_for_status()

    def put_statistics(
        self, step: int, body: bytes | RolloutBatch, shard: int = 0, shards: int = 1, full: FullRollouts = _FEW
    ) -> httpx.Response:
        """Upload a shard as statistics, of a batch with `full` of its rollouts in full."""
        content = body if isinstance(body, bytes) else encode_statistics_shard(body, seed="a", full=full)
        return self.http.put(
            f"/v1/runs/{self.run}/steps/{step}/statistics/{shard}",
            params={"attempt": self.attempt, "shards": shards},
            content=content,
            headers={"Content-Type": STATISTICS},
        )

    def put_scalars(self, step: int, values: dict[str, float | None], source: str = "trainer") -> httpx.Response:
        return self.http.put(
            f"/v1/runs/{self.run}/steps/{step}/scalars",
            params={"attempt": self.attempt},
            json={"source": source, "values": values},
        )

    def get(self, path: str, **query: Any) -> httpx.Response:
        # Without a parameter, so that a query in the path stays.
        return self.http.get(f"/v1/runs/{self.run}/{path}", params=query or None)

    def read(self, path: str, **query: Any) -> Any:
        """Return the JSON at a path below the run."""
        return self.get(path, **query).raise_for_status().json()

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Return the items of all pages of a list below the run."""
        return all_items(self.http, f"/v1/runs/{self.run}/{path}", **query)

    def about(self) -> Any:
        return self.http.get(f"/v1/runs/{self.run}").raise_for_status().json()

    def new_attempt(self, key: str, resume_step: int) -> Sender:
        """Resume the run; return its new attempt."""
        answer = self.http.post(f"/v1/runs/{self.run}/attempts", json={"key": key, "resume_step": resume_step})
        return Sender(self.http, self.run, answer.raise_for_status().json()["attempt"])


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the kind of a problem document."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["type"].removeprefix("urn:foreshock:problem:")


def all_items(http: httpx.Client, path: str, limit: int = 100, **query: Any) -> list[dict[str, Any]]:
    """Return the items of all pages of a list."""
    items: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = http.get(path, params={"limit": limit, **query, **cursor}).raise_for_status().json()
        assert len(page["items"]) <= limit
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        cursor = {"cursor": page["next_cursor"]}


def start_run(http: httpx.Client, key: str = "a-run", **fields: Any) -> Sender:
    """Create a run; return its first attempt."""
    run = http.post("/v1/runs", json={"key": key, **fields}).raise_for_status().json()["id"]
    http.post(f"/v1/runs/{run}/attempts", json={"key": "first"}).raise_for_status()
    return Sender(http, run)
