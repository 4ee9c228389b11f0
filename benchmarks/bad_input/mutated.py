"""Mutated tables and documents, sent to the calls that take them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.documents import hostile_document
from benchmarks.bad_input.scene import STEP, Scene
from benchmarks.bad_input.tables import bomb, damaged, hostile_table
from foreshock.scorers import REFERENCE, TRAINER_REPLAY
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS
from tests.service.sending import PARQUET

# Bombs take seconds of a decoder each: one in so many bodies.
_ONE_BOMB_IN = 100
_TABLES_SHARE = 0.6


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
        request = _request(scene, bodies, number, random.Random(f"{seed}/{number}"))
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


def _request(scene: Scene, bodies: dict[str, bytes], number: int, source: random.Random) -> Request:
    if source.random() < _TABLES_SHARE:
        return _table_request(scene, bodies, number, source)
    return _document_request(scene, number, source)


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


def _document_request(scene: Scene, number: int, source: random.Random) -> Request:
    method, path, scope, valid = source.choice(_documents(scene, number))
    url = path.format(
        run=scene.run, step=number % STEP, lease=scene.holder.lease["lease"], attempt=1, client="c",
        probe=scene.holder.lease["job"]["probe"],
    )  # fmt: skip
    headers = (
        {"X-Foreshock-Lease-Token": str(scene.holder.token)}
        if path.endswith(("weights-search", "layers", "routing"))
        else {}
    )
    return Request(method, path, url, scope, hostile_document(valid, source), "application/json", headers)


def _documents(scene: Scene, number: int) -> list[tuple[str, str, str, Any]]:
    """Return a valid document of every call that takes one, with the scope of a key that may send it."""
    lease: Callable[[], dict[str, Any]] = lambda: {"token": scene.holder.token + 1}  # noqa: E731
    worker = {"worker": "w2", "accelerator": "cpu", "scorers": [scene.scorer], "environments": ["avx2"], "wait": 0}
    search = {
        "step": STEP, "scorer": scene.scorer, "rollouts": 6, "tokens": 40, "floor_k3": 1e-4,
        "replays": [{"step": STEP, "part": "all", "k3_kl": 1e-3, "k3_low": 1e-4, "k3_high": 1e-2, "max_abs_d": 0.1}],
    }  # fmt: skip
    mean = {"mean": 1e-3, "low": 1e-4, "high": 1e-2}
    distance = {"relative_l2": mean, "relative_l2_p99": 0.1, "cosine": mean}
    layers = {
        "step": STEP, "compared": TRAINER_REPLAY, "reference": REFERENCE, "rollouts": 6, "groups": 2,
        "tokens": 40, "states": 40, "non_finite": 0, "compared_fingerprint": {}, "reference_fingerprint": {"flags": {}},
        "layers": [{"name": name, "distance": distance, "compared_floor": distance, "reference_floor": distance}
                   for name in ("embeddings", "layers.0", "norm")],
    }  # fmt: skip
    share = {"mean": 0.5, "low": 0.25, "high": 0.75, "clusters": 2}
    tokens = {"tokens": 20, "rollouts": 3, "k3_kl": share, "abs_d": share}
    routing = {
        "target": TRAINER_REPLAY, "behaviour": REFERENCE, "target_fingerprint": {}, "behaviour_fingerprint": {},
        "measures": {
            "top_k": 2, "any_difference": share, "k3_share": share, "all_tokens": tokens, "agreeing": tokens,
            "differing": tokens, "groups": 2, "excluded": 0,
            "layers": [{"layer": 0, "agreement": share, "overlap": share, "first_differences": share}],
        },
    }  # fmt: skip
    checkpoint = {"root": "runs", "path": "step-1", "digest": "sha256:" + "ab" * 32, "model_kind": "dense"}
    run = {"key": f"run {number}", "project": "p", "model": "m", "initial_learning_rate": 1e-6, "length_cap": 100}
    attempt = {"key": "first", "resume_step": 0, "fingerprint": {"engine": "vllm", "flags": {"x": [1, 2.5]}}}
    return [
        (
            "PUT",
            "/v1/runs/{run}/steps/{step}/scalars",
            "ingest",
            {"source": "trainer", "values": {"x": 1.5, "y": None}},
        ),
        ("PUT", "/v1/runs/{run}/steps/{step}/scalars", "ingest", {"source": "trainer", "values": {"grad_norm": 1.0}}),
        ("POST", "/v1/runs", "ingest", run),
        ("PATCH", "/v1/runs/{run}", "ingest", {"name": "n", "advice_mode": "shadow", "model_kind": "moe"}),
        ("POST", "/v1/runs/{run}/attempts", "ingest", attempt),
        ("PUT", "/v1/runs/{run}/attempts/{attempt}/clients/{client}", "ingest", {"step": 3, "dropped": 1}),
        ("PUT", "/v1/runs/{run}/checkpoints/{step}", "ingest", checkpoint),
        ("POST", "/v1/runs/{run}/probes", "ingest", {"step": STEP, "scorers": [{"scorer": scene.scorer}]}),
        ("POST", "/v1/leases", "worker", worker),
        ("POST", "/v1/leases/{lease}/heartbeat", "worker", lease()),
        ("POST", "/v1/leases/{lease}/fail", "worker", {**lease(), "reason": "x", "kind": "retry"}),
        ("PUT", "/v1/leases/{lease}/weights-search", "worker", search),
        ("PUT", "/v1/leases/{lease}/layers", "worker", layers),
        ("PUT", "/v1/leases/{lease}/routing", "worker", routing),
        ("POST", "/v1/runs/{run}/lr-advice/follow", "ingest", {"step": 3, "attempt": 1}),
        ("POST", "/v1/runs/{run}/lr-advice/ack", "ingest", {"revision": 1, "step": 3, "applied_lr": 1e-6}),
        ("POST", "/v1/runs/{run}/lr-advice/decisions", "admin", {"kind": "hold", "reason": "a reason"}),
    ]
