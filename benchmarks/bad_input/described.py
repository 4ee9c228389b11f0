"""Schemathesis over the service's own OpenAPI document, with the key of each scope and without one."""

from __future__ import annotations

import warnings
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.core.result import Ok

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.scene import SCOPES, STEP, Scene
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS
from tests.service.sending import PARQUET

# In so many of ten requests, existing ids replace generated ones: with random ids every answer would be a 404.
_REAL_IN_TEN = 8


def send_described(scene: Scene, examples: int, seed: int) -> Tally:
    """Send `examples` generated requests of each operation with each key; the same seed gives the same requests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _register_tables()
        schema = schemathesis.openapi.from_url(f"{scene.url}/openapi.json")
        tally = Tally()
        for result in schema.get_all_operations():
            assert isinstance(result, Ok), "the document has an operation that cannot be read"
            operation = result.ok()
            for index, scope in enumerate((*SCOPES, "none")):
                _send_operation(scene, operation, scope, examples, seed + index, tally)
    return tally


def _register_tables() -> None:
    """Generate any bytes for bodies of tables; `mutated.py` sends nearly valid tables."""
    for media_type in (PARQUET, STATISTICS):
        schemathesis.openapi.media_type(media_type, hypothesis.strategies.binary(max_size=200))

        @schemathesis.serializer(media_type)
        def as_bytes(context: object, value: object) -> bytes:
            return value if isinstance(value, bytes) else repr(value).encode()


def _send_operation(scene: Scene, operation: Any, scope: str, examples: int, seed: int, tally: Tally) -> None:
    responses = operation.definition.raw["responses"]
    method, path = operation.method.upper(), operation.path

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(), real=hypothesis.strategies.integers(0, 9))
    def send(case: Any, real: int) -> None:
        if real < _REAL_IN_TEN and method != "DELETE":
            _use_real_ids(case.path_parameters, scene)
        _never_wait(case)
        answer = case.call(base_url=scene.url, headers=scene.headers(scope), timeout=120)
        headers = {name.lower(): values[0] for name, values in answer.headers.items()}
        example = f"{scope}, {method} {case.path_parameters} {case.query}"
        tally.judge((method, path), responses, answer.status_code, headers, answer.content, example)

    send()


def _use_real_ids(parameters: Any, scene: Scene) -> None:
    known = {
        "run": scene.run, "step": STEP, "shard": 0, "attempt": 1, "lease": scene.holder.lease["lease"],
        "probe": scene.holder.lease["job"]["probe"],
    }  # fmt: skip
    for name in parameters or {}:
        if name in known:
            parameters[name] = known[name]


def _never_wait(case: Any) -> None:
    """Make long polls answer at once."""
    if case.query and "wait" in case.query:
        case.query["wait"] = 0
    if isinstance(case.body, dict) and "wait" in case.body:
        case.body["wait"] = 0
