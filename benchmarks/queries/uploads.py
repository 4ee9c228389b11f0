"""Uploads at a steady rate, in a process of their own: what the service does while it is asked."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized

import httpx
import numpy as np

from foreshock.rollouts import RolloutBatch, encode_rollouts

PARQUET = "application/vnd.apache.parquet"
_ROLLOUTS, _TOKENS = 128, 1_000


def encoded_batch(rollouts: int, tokens: int, seed: int = 0) -> bytes:
    """Return rollouts of equal length with both log-probs, as a client sends them."""
    random = np.random.default_rng(seed)
    total = rollouts * tokens
    behaviour = -random.exponential(0.5, total).astype(np.float32)
    target = np.minimum(behaviour + random.normal(0, 0.02, total), 0.0).astype(np.float32)
    batch = RolloutBatch.from_arrays(
        sample_ids=[f"sample-{number}" for number in range(rollouts)],
        group_ids=[f"group-{number // 8}" for number in range(rollouts)],
        prompt_token_ids=np.zeros(rollouts, dtype=np.int32),
        prompt_offsets=np.arange(rollouts + 1),
        response_token_ids=random.integers(0, 32_000, total).astype(np.int32),
        response_offsets=np.arange(rollouts + 1) * tokens,
        rollout_log_probs=behaviour,
        trainer_log_probs=target,
        reward=random.random(rollouts).astype(np.float32),
    )
    return encode_rollouts(batch)


@contextmanager
def steady_uploads(url: str, key: str, tokens_per_second: float, first_step: int) -> Iterator[Synchronized[int]]:
    """Upload steps of a run from another process while the block runs; gives the tokens that were committed."""
    spawning = multiprocessing.get_context("spawn")
    sent: Synchronized[int] = spawning.Value("q", 0)
    process = spawning.Process(target=_upload, args=(url, key, tokens_per_second, first_step, sent))
    process.start()
    try:
        while sent.value == 0 and process.is_alive():
            time.sleep(0.05)
        yield sent
    finally:
        process.terminate()
        process.join()


def _upload(url: str, key: str, tokens_per_second: float, first_step: int, sent: Synchronized[int]) -> None:
    body = encoded_batch(_ROLLOUTS, _TOKENS)
    with httpx.Client(base_url=url, timeout=600) as http:
        run = http.post("/v1/runs", json={"key": key}).raise_for_status().json()["id"]
        http.post(f"/v1/runs/{run}/attempts", json={"key": "first"}).raise_for_status()
        due, step = time.monotonic(), first_step
        while True:
            path = f"/v1/runs/{run}/steps/{step}/rollouts/0"
            http.put(path, content=body, headers={"Content-Type": PARQUET}).raise_for_status()
            with sent.get_lock():
                sent.value += _ROLLOUTS * _TOKENS
            step += 1
            due = max(due + _ROLLOUTS * _TOKENS / tokens_per_second, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))
