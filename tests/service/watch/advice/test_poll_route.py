"""The route of polls answers as the declared route does, and leaves to it what it does not take."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys.limits import KeyLimits
from foreshock_service.platform.keys.service import Scope, revoke_key
from foreshock_service.watch.advice.poll_route import poll_of
from tests.service.two_routes import answer_of_both, make_key
from tests.service.watch.recorded import RecordedRun

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def run(http: httpx.Client, app: FastAPI) -> RecordedRun:
    return RecordedRun(app.state.context.database).begin(advice_mode="apply")


def both(
    http: httpx.Client, run: str, headers: dict[str, str] | None = None, **parameters: str | float
) -> tuple[object, ...]:
    """Return the answer, which is that of the declared route too."""
    return answer_of_both(http, f"/v1/runs/{run}/lr-advice", headers, parameters)


@on_sqlite
def test_both_routes_give_the_same_answers(http: httpx.Client, run: RecordedRun, app: FastAPI) -> None:
    status, headers, _ = both(http, run.run)
    assert status == 200
    assert isinstance(headers, dict)
    same = {"If-None-Match": headers["etag"]}
    assert both(http, run.run, same)[0] == 304
    assert both(http, run.run, same, wait=0.1)[0] == 304
    assert both(http, run.run, same, step=3, follow="true")[0] == 200
    assert both(http, "run_" + "0" * 26)[0] == 404
    _, reader = make_key(app.state.context.database, Scope.READ)
    _, worker = make_key(app.state.context.database, Scope.WORKER)
    _, stranger = make_key(app.state.context.database, Scope.READ, project="another")
    assert both(http, run.run)[0] == 401
    assert both(http, run.run, {"Authorization": "Bearer fsk_unknown"})[0] == 401
    assert both(http, run.run, worker)[0] == 403
    assert both(http, run.run, stranger)[0] == 404
    assert both(http, run.run, reader, step=7)[0] == 200
    http.delete(f"/v1/runs/{run.run}", headers=make_key(app.state.context.database, Scope.ADMIN)[1]).raise_for_status()
    assert both(http, run.run, reader)[0] == 410


@on_sqlite
def test_only_the_key_that_was_asked_with_answers_count(http: httpx.Client, run: RecordedRun, app: FastAPI) -> None:
    database: Database = app.state.context.database
    key, headers = make_key(database, Scope.READ)
    assert http.get(f"/v1/runs/{run.run}/lr-advice", headers=headers).status_code == 200
    database.write(lambda session: revoke_key(session, key))
    assert http.get(f"/v1/runs/{run.run}/lr-advice", headers=headers).status_code == 401


@on_sqlite
def test_poll_counts_against_the_limit_of_its_key(http: httpx.Client, run: RecordedRun, app: FastAPI) -> None:
    _, headers = make_key(app.state.context.database, Scope.READ)
    limits: KeyLimits = app.state.context.key_limits
    limits._rates = (1.0, limits._rates[1])
    statuses = [http.get(f"/v1/runs/{run.run}/lr-advice", headers=headers).status_code for _ in range(8)]
    assert (statuses[0], statuses[-1]) == (200, 429)


@pytest.mark.parametrize(
    "query",
    ["step=-1", "step=1&step=2", "wait=31", "wait=nan", "wait=1e1", "follow=1", "stepp=1", "step=", "step=99999999999"],
)
def test_unusual_parameters_are_for_the_declared_route(query: str) -> None:
    scope = {"path": f"/v1/runs/run_{'0' * 26}/lr-advice", "headers": []}
    assert poll_of({**scope, "query_string": b"step=1&wait=2.5&follow=true"}) is not None
    assert poll_of({**scope, "query_string": query.encode()}) is None


@pytest.mark.parametrize(
    "headers",
    [
        [(b"cookie", b"foreshock_session=a")],
        [(b"authorization", b"Basic a")],
        [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
        [(b"if-none-match", b"a" * 1001)],
    ],
)
def test_sessions_and_odd_headers_are_for_the_declared_route(
    headers: list[tuple[bytes, bytes]],
) -> None:
    scope = {"path": f"/v1/runs/run_{'0' * 26}/lr-advice", "query_string": b""}
    assert poll_of({**scope, "headers": headers}) is None
