"""A short training run that is exported: step 2 closes after steps 3 to 5, because its second shard comes late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from foreshock import Client
from tests.foreshock.batches import random_batch

STEPS = range(1, 7)
LATE_STEP = 2


def train(client: Client, log_reward: Callable[[int], None], *, wait: Callable[[int], None] = lambda _: None) -> None:
    """Log six steps and their rewards; `wait(steps)` is called when so many have closed."""
    client.start_run(model="M", initial_learning_rate=1e-6)
    for step in STEPS:
        batch = random_batch(step)
        half = batch.num_rollouts // 2
        if step == LATE_STEP:
            client.log_rollouts(step, batch.select(range(half)), shard=0, shards=2)
        else:
            client.log_rollouts(step, batch)
        log_reward(step)
        if step == 5:
            wait(4)
            late = random_batch(LATE_STEP)
            client.log_rollouts(LATE_STEP, late.select(range(half, late.num_rollouts)), shard=1, shards=2)
        elif step != LATE_STEP:
            assert client.flush(300)
    assert client.flush(300)


def curve(client: Client, measure: str) -> dict[int, float]:
    """Return what the service has: step → value of `measure`."""
    query = {"comparison": "trainer/rollout", "measure": measure}
    address = f"{client.settings.url}/v1/runs/{client.run_id}/measurements"
    columns: dict[str, list[Any]] = httpx.get(address, params=query, timeout=60).raise_for_status().json()["columns"]
    return dict(zip(columns["step"], columns[measure], strict=True))


def wait_until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
