"""Mutated tables, sent to the calls that take them."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.scene import STEP, Scene
from benchmarks.bad_input.tables import bomb, damaged, hostile_table
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS
from tests.service.sending import PARQUET

# Bombs take seconds of a decoder each: one in so many bodies.
_ONE_BOMB_IN = 100


@dataclass(frozen=True, slots=True)
class Request:
    """One hostile request; `path` is that of the OpenAPI document."""

    method: str
    path: str
    url: str
    scope: str
    content: bytes
    media_type: str
    headers: dict[str, str]


def send_mutated(scene: Scene, document: dict[str, Any], count: int, seed: int, threads: int = 4) -> Tally:
    """Send `count` mutated bodies; the same seed gives the same bodies."""
    tally, lock, bodies = Tally(), threading.Lock(), scene.valid_bodies()

    def send(number: int) -> None:
        request = _table_request(scene, bodies, number, random.Random(f"{seed}/{number}"))
        example = f"seed {seed}, number {number}, {len(request.content)} bytes"
        responses = document["paths"][request.path][request.method.lower()]["responses"]
        headers = {**scene.headers(request.scope), **request.headers, "Content-Type": request.media_type}
        try:
            answer = http.request(request.method, request.url, content=request.content, headers=headers)
        except httpx.HTTPError as error:
            with lock:
                tally.note(f"{request.method} {request.path}: no answer", f"{example}: {error!r}")
            return
        with lock:
            operation = (request.method, request.path)
            tally.judge(operation, responses, answer.status_code, answer.headers, answer.content, example)

    with httpx.Client(base_url=scene.url, timeout=120) as http, ThreadPoolExecutor(threads) as pool:
        list(pool.map(send, range(count)))
    return tally


def _table_request(scene: Scene, bodies: dict[str, bytes], number: int, source: random.Random) -> Request:
    kind = source.choice(["rollouts", "rollouts", "statistics", "scores"])
    valid, other = bodies[kind], bodies[source.choice(sorted(bodies))]
    if kind != "statistics" and number % _ONE_BOMB_IN == 0:
        content = bomb(source)
    elif kind == "statistics" or source.random() < 0.5:
        content = damaged(valid, other, source)
    else:
        content = hostile_table(valid, source)
    if kind == "scores":
        url = f"{scene.holder.url}/scores/{number}?scorer={scene.scorer}&variant="
        token = {"X-Foreshock-Lease-Token": str(scene.holder.token)}
        return Request("PUT", "/v1/leases/{lease}/scores/{shard}", url, "worker", content, PARQUET, token)
    path = f"/v1/runs/{{run}}/steps/{{step}}/{kind}/{{shard}}"
    url = path.format(run=scene.run, step=number % STEP, shard=0)
    return Request("PUT", path, url, "ingest", content, PARQUET if kind == "rollouts" else STATISTICS, {})
