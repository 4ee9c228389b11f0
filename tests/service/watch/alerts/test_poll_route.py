"""The route of polls of alerts answers as the declared route does, and leaves to it what it does not take."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.platform.keys.service import Scope
from foreshock_service.watch.alerts.poll_route import AlertPollRoute
from tests.service.two_routes import answer_of_both, make_key
from tests.service.watch.recorded import RecordedRun

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def run(http: httpx.Client, app: FastAPI) -> RecordedRun:
    return RecordedRun(app.state.context.database).begin(advice_mode="apply")


def test_both_routes_give_the_same_answers(http: httpx.Client, run: RecordedRun, app: FastAPI) -> None:
    url = f"/v1/runs/{run.run}/alerts"
    status, headers, _ = answer_of_both(http, url, None, {})
    assert status == 200
    assert isinstance(headers, dict)
    same = {"If-None-Match": headers["etag"]}
    assert answer_of_both(http, url, same, {})[0] == 304
    assert answer_of_both(http, url, same, {"wait": 0.1})[0] == 304
    assert answer_of_both(http, url, same, {"limit": 7, "state": "open"})[0] in (200, 304)
    assert answer_of_both(http, "/v1/runs/run_" + "0" * 26 + "/alerts", None, {})[0] == 404
    database = app.state.context.database
    reader = make_key(database, Scope.READ)[1]
    assert answer_of_both(http, url, None, {})[0] == 401
    assert answer_of_both(http, url, make_key(database, Scope.WORKER)[1], {})[0] == 403
    assert answer_of_both(http, url, make_key(database, Scope.READ, project="another")[1], {})[0] == 404
    assert answer_of_both(http, url, reader, {"wait": 1})[0] == 200


@pytest.mark.parametrize(
    "query", ["state=no", "state=open&state=resolved", "limit=0", "limit=501", "wait=31", "cursor=a", "unknown=1"]
)
def test_unusual_parameters_are_for_the_declared_route(app: FastAPI, query: str) -> None:
    route = next(each for each in app.router.routes if isinstance(each, AlertPollRoute))
    scope = {"path": f"/v1/runs/run_{'0' * 26}/alerts", "headers": []}
    assert route.asked_of({**scope, "query_string": b"state=open&wait=2.5&limit=500"}) is not None
    assert route.asked_of({**scope, "query_string": query.encode()}) is None
    assert route.asked_of({**scope, "path": "/v1/runs/a-key/alerts", "query_string": b""}) is None
