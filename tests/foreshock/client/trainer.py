"""Helpers of a trainer: clients, random rollouts, waiting for a condition, and what the service or the spool has."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from foreshock import Client


@contextmanager
def clients(url: str, spool: Path, **settings: Any) -> Iterator[Callable[..., Client]]:
    """Yield `make(run_key, **options)`, a client with these settings; all are closed after the block."""
    made: list[Client] = []

    def make(run_key: str = "run", **options: Any) -> Client:
        made.append(Client(**{"url": url, "run_key": run_key, "spool_directory": spool, **settings, **options}))
        return made[-1]

    yield make
    for client in made:
        client.close(0.5)


def get(client: Client, path: str, **query: Any) -> Any:
    """Return the service's answer below the client's run, once its newest data is worked out."""
    run = f"{client.settings.url}/v1/runs/{client.run_id}"
    deadline = time.monotonic() + 60
    while httpx.get(run, timeout=60).raise_for_status().json()["advancing"]:
        assert time.monotonic() < deadline, "the run is not advanced"
        time.sleep(0.05)
    return httpx.get(f"{run}{path}", params=query, timeout=60).raise_for_status().json()


def rollouts(seed: int = 0, count: int = 3) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 5, count)
    return {
        "prompt_token_ids": generator.integers(0, 9, count),
        "prompt_lengths": np.ones(count, np.int64),
        "response_token_ids": generator.integers(0, 9, int(lengths.sum())),
        "response_lengths": lengths,
        "rollout_log_probs": -generator.exponential(1.0, int(lengths.sum())).astype(np.float32),
    }


def spooled_bodies(spool: Path) -> list[bytes]:
    """Return the bytes of the undelivered requests in a spool, without those of registrations, in order."""
    # A folder or an item that is being written has a name that begins with a dot, and may go while it is read.
    items = [item for folder in sorted(spool.glob("[!.]*")) for item in sorted(folder.glob("[!.]*.item"))]
    bodies = (path.read_bytes().partition(b"\n")[2] for path in items)
    return [body for body in bodies if body]
