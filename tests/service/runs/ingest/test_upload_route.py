"""The route of small uploads answers as the declared route does, and leaves to it what it does not take."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.body_limits import PARQUET_MEDIA_TYPE
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys.limits import KeyLimits
from foreshock_service.platform.keys.service import Scope, create_key, new_secret
from foreshock_service.platform.uploads import SMALL_BODY_BYTES
from foreshock_service.runs.ingest.upload_route import upload_of
from tests.service.sending import make_batch, start_run

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

# A parameter that only the declared route knows; it changes nothing where the run is named by its id.
DECLARED = {"project": "any"}
RUN = "run_" + "0" * 26
PATH = f"/v1/runs/{RUN}/steps/3/rollouts/0"
HEADERS = [(b"content-type", PARQUET_MEDIA_TYPE.encode()), (b"content-length", b"100")]


def make_key(database: Database, *scopes: Scope, project: str | None = None) -> dict[str, str]:
    secret = new_secret()
    database.write(lambda session: create_key(session, secret, "test", project, scopes))
    return {"Authorization": f"Bearer {secret}"}


def content_of(answer: httpx.Response) -> tuple[object, ...]:
    """Return the status, the headers and the body without what differs between any two requests."""
    headers = {name: text for name, text in answer.headers.items() if name not in ("date", "x-request-id")}
    body = answer.content
    if answer.is_error:
        body = repr({**answer.json(), "request_id": "", "instance": ""}).encode()
        headers.pop("content-length")
    return answer.status_code, headers, body


def both(
    http: httpx.Client, paths: tuple[str, str], body: bytes, headers: dict[str, str] | None = None, **parameters: int
) -> tuple[object, ...]:
    """Return the answer to an upload of the first path, which is that of the declared route to the second one too."""
    sent = {"Content-Type": PARQUET_MEDIA_TYPE} | (headers or {})
    quick = content_of(http.put(paths[0], params=parameters, content=body, headers=sent))
    declared = content_of(http.put(paths[1], params={**parameters, **DECLARED}, content=body, headers=sent))
    assert quick == declared
    return quick


@on_sqlite
def test_both_routes_give_the_same_answers(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http).run
    body, other = (encode_rollouts(make_batch(2, seed=seed)) for seed in (1, 2))
    assert len(body) < SMALL_BODY_BYTES
    paths = (f"/v1/runs/{run}/steps/0/rollouts/0", f"/v1/runs/{run}/steps/1/rollouts/0")
    assert both(http, paths, body)[0] == 201
    assert both(http, paths, body)[0] == 200
    same = (paths[0], paths[0])
    assert both(http, same, other)[0] == 409
    assert both(http, same, body, shards=2)[0] == 409
    assert both(http, same, body, attempt=9)[0] == 404
    assert both(http, (PATH, PATH), body)[0] == 404
    missing = f"/v1/runs/{run}/steps/2/rollouts/1"
    assert both(http, (missing, missing), body)[0] == 422
    assert both(http, (missing, missing), b"PAR1 is not enough", shards=2)[0] == 422
    statistics = f"/v1/runs/{run}/steps/2/statistics/0"
    assert both(http, (statistics, statistics), body)[0] == 415
    database = app.state.context.database
    ingester, reader = make_key(database, Scope.INGEST), make_key(database, Scope.READ)
    stranger = make_key(database, Scope.INGEST, project="another")
    assert both(http, same, body)[0] == 401
    assert both(http, same, body, {"Authorization": "Bearer fsk_unknown"})[0] == 401
    assert both(http, same, body, reader)[0] == 403
    assert both(http, same, body, stranger)[0] == 404
    assert both(http, same, body, ingester)[0] == 200


@on_sqlite
def test_upload_counts_against_the_limit_of_its_key(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http).run
    headers = make_key(app.state.context.database, Scope.INGEST) | {"Content-Type": PARQUET_MEDIA_TYPE}
    limits: KeyLimits = app.state.context.key_limits
    limits._rates = (1.0, limits._rates[1])
    body = encode_rollouts(make_batch(1, seed=1))
    url = f"/v1/runs/{run}/steps/0/rollouts/0"
    statuses = [http.put(url, content=body, headers=headers).status_code for _ in range(8)]
    assert (statuses[0], statuses[-1]) == (201, 429)


def taken(path: str = PATH, query: str = "", headers: list[tuple[bytes, bytes]] | None = None) -> bool:
    given = HEADERS if headers is None else headers
    scope = {"type": "http", "method": "PUT", "path": path, "query_string": query.encode(), "headers": given}
    return upload_of(scope) is not None


@pytest.mark.parametrize("query", ["", "attempt=2", "attempt=1&shards=4"])
def test_usual_uploads_are_taken(query: str) -> None:
    assert taken(query=query)
    assert taken(path=PATH.replace("rollouts", "statistics"), query=query) is False
    body = [(b"content-type", b"application/vnd.foreshock.statistics"), (b"content-length", b"100")]
    assert taken(headers=[*HEADERS, (b"authorization", b"Bearer a")], query=query)
    assert taken(headers=body, query=query) is False


@pytest.mark.parametrize(
    "query", ["attempt=0", "attempt=1&attempt=2", "shards=x", "shards=", "shard=1", "attempt=99999999999", "project=a"]
)
def test_unusual_parameters_are_for_the_declared_route(query: str) -> None:
    assert not taken(query=query)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/my-run/steps/3/rollouts/0",
        f"/v1/runs/{RUN}/steps/-1/rollouts/0",
        f"/v1/runs/{RUN}/steps/9999999999/rollouts/0",
        f"/v1/runs/{RUN}/steps/3/rollouts/x",
        f"/v1/runs/{RUN}/steps/3/rollouts/0/",
        f"/v1/runs/{RUN}/steps/3/scalars",
    ],
)
def test_other_paths_are_for_other_routes(path: str) -> None:
    assert not taken(path)


@pytest.mark.parametrize(
    "headers",
    [
        [*HEADERS, (b"cookie", b"foreshock_session=a")],
        [*HEADERS, (b"authorization", b"Basic a")],
        [*HEADERS, (b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
        [*HEADERS, (b"content-encoding", b"zstd")],
        HEADERS[:1],
        [HEADERS[0], (b"content-length", b"70000")],
        [HEADERS[1], (b"content-type", b"text/plain")],
    ],
)
def test_sessions_large_bodies_and_odd_headers_are_for_the_declared_route(headers: list[tuple[bytes, bytes]]) -> None:
    assert not taken(headers=headers)
