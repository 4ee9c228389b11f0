"""The load generator: bodies encoded beforehand, and the connections that send them."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from foreshock.rollouts import RolloutBatch, encode_rollouts

PARQUET = "application/vnd.apache.parquet"
JSON = "application/json"
# Distinct bodies that are sent over and over, under new step numbers.
DISTINCT = 16


@dataclass(frozen=True)
class Request:
    """One PUT; `closes` is True if its answer must say that the step is closed."""

    path: str
    body: bytes
    media_type: str = PARQUET
    closes: bool = True


def encoded_shards(rollouts: int, tokens: int, count: int) -> list[bytes]:
    """Return `count` different bodies of `rollouts` × `tokens` response tokens with two log-probs and a reward."""
    random = np.random.default_rng(rollouts * tokens)
    total = rollouts * tokens
    bodies = []
    for _ in range(count):
        log_probs = -random.exponential(0.5, total).astype(np.float32)
        batch = RolloutBatch.from_arrays(
            [f"rollout-{number}" for number in range(rollouts)],
            prompt_offsets=np.arange(rollouts + 1),
            prompt_token_ids=random.integers(0, 32_000, rollouts),
            response_offsets=np.arange(rollouts + 1) * tokens,
            # Ids of a vocabulary: a few are frequent.
            response_token_ids=np.minimum(random.zipf(1.3, total), 32_000).astype(np.int32),
            rollout_log_probs=log_probs,
            trainer_log_probs=np.minimum(log_probs + random.normal(0.0, 0.01, total), 0.0).astype(np.float32),
            reward=random.random(rollouts).astype(np.float32),
        )
        bodies.append(encode_rollouts(batch))
    return bodies


def start_run(address: str, key: str) -> str:
    """Create a run with one attempt; return its path `/v1/runs/{id}`."""
    connection = _connect(address)
    run = json.loads(_exchange(connection, "POST", "/v1/runs", json.dumps({"key": key}).encode(), JSON))["id"]
    path = f"/v1/runs/{run}"
    _exchange(connection, "POST", f"{path}/attempts", b'{"key": "first"}', JSON)
    connection.close()
    return path


def send(address: str, requests: Iterable[Request], connections: int) -> None:
    """Send the requests in order over so many connections at a time; raises what one of them raised.

    Returns when every request is answered, so every step is committed, measured and closed.
    """
    waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    errors: list[Exception] = []
    threads = [threading.Thread(target=_send_all, args=(address, waiting, errors)) for _ in range(connections)]
    for thread in threads:
        waiting.put(None)
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _send_all(address: str, waiting: queue.SimpleQueue[Request | None], errors: list[Exception]) -> None:
    connection = _connect(address)
    try:
        while not errors and (request := waiting.get()) is not None:
            answer = _exchange(connection, "PUT", request.path, request.body, request.media_type)
            if request.closes and not json.loads(answer)["step_closed"]:
                raise AssertionError(f"{request.path} did not close its step")
    except Exception as error:
        errors.append(error)
    finally:
        connection.close()


def _connect(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)


def _exchange(connection: http.client.HTTPConnection, method: str, path: str, body: bytes, media_type: str) -> bytes:
    connection.request(method, path, body, {"Content-Type": media_type})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path} was answered with {answer.status}: {text[:300]!r}")
    return text
