"""The route of one rollout's tokens answers as the declared route does, and leaves to it what it does not take."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys.limits import KeyLimits
from foreshock_service.platform.keys.service import Scope
from foreshock_service.runs.rollouts.token_route import RolloutTokensRoute
from tests.service.sending import Sender, make_batch, start_run
from tests.service.two_routes import answer_of_both, make_key

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
BATCH = make_batch(70, seed=3)
NAME = BATCH.sample_ids[66]


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    sender = start_run(http)
    sender.put_shard(2, BATCH).raise_for_status()
    return sender


@on_sqlite
def test_both_routes_give_the_same_answers(http: httpx.Client, run: Sender, app: FastAPI) -> None:
    url = f"/v1/runs/{run.run}/steps/2/tokens"

    def both(
        headers: dict[str, str] | None = None, at: str = url, **parameters: str | float
    ) -> tuple[object, dict[str, str]]:
        status, answered, _ = answer_of_both(http, at, headers, {"sample_id": NAME, **parameters})
        assert isinstance(answered, dict)
        return status, answered

    status, headers = both()
    assert status == 200
    assert both({"If-None-Match": headers["etag"]})[0] == 304
    assert both(attempt=1, from_position=1, to_position=2, comparison="trainer/rollout")[0] == 200
    for name in ("json", "csv", "parquet"):
        assert both(format=name)[0] == 200
    assert both({"Accept": "text/csv"})[1]["content-type"].startswith("text/csv")
    assert both({"Accept": "image/png"})[0] == 406
    assert both({"Accept-Encoding": "gzip"})[1]["content-encoding"] == "gzip"
    assert both(sample_id="nobody")[0] == 404
    assert both(attempt=9)[0] == 404
    assert both(comparison="no/such")[0] == 422
    assert both(at=url.replace("steps/2", "steps/3"))[0] == 404
    assert both(at=url.replace(run.run, "run_" + "0" * 26))[0] == 404
    database: Database = app.state.context.database
    assert both(make_key(database, Scope.READ)[1])[0] == 200
    assert both()[0] == 401
    assert both(make_key(database, Scope.WORKER)[1])[0] == 403
    assert both(make_key(database, Scope.READ, project="another")[1])[0] == 404


@on_sqlite
def test_a_request_counts_against_the_limit_of_its_key(http: httpx.Client, run: Sender, app: FastAPI) -> None:
    _, headers = make_key(app.state.context.database, Scope.READ)
    limits: KeyLimits = app.state.context.key_limits
    limits._rates = (1.0, limits._rates[1])
    url = f"/v1/runs/{run.run}/steps/2/tokens"
    statuses = [http.get(url, params={"sample_id": NAME}, headers=headers).status_code for _ in range(8)]
    assert (statuses[0], statuses[-1]) == (200, 429)


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("steps/2/tokens", ""),
        ("steps/2/tokens", "sample_id=a&worst=3"),
        ("steps/2/tokens", "sample_id=a&sample_id=b"),
        ("steps/2/tokens", "sample_id=" + "a" * 1025),
        ("steps/2/tokens", "sample_id=a&attempt=0"),
        ("steps/2/tokens", "sample_id=a&from_position=-1"),
        ("steps/2/tokens", "sample_id=a&format=xml"),
        ("steps/2/tokens", "sample_id=a&comparison=a%00b"),
        ("steps/2/exact/tokens", "sample_id=a"),
        ("steps/99999999999/tokens", "sample_id=a"),
        ("steps/x/tokens", "sample_id=a"),
    ],
)
def test_other_requests_are_for_the_declared_route(app: FastAPI, path: str, query: str) -> None:
    route = next(each for each in app.router.routes if isinstance(each, RolloutTokensRoute))
    begin = f"/v1/runs/run_{'0' * 26}/"
    usual = {"path": begin + "steps/2/tokens", "query_string": b"sample_id=a", "headers": []}
    assert route.asked_of(usual) is not None
    assert route.asked_of({**usual, "path": begin + path, "query_string": query.encode()}) is None
    assert route.asked_of({**usual, "path": "/v1/runs/my-run/steps/2/tokens"}) is None
    assert route.asked_of({**usual, "headers": [(b"cookie", b"foreshock_session=a")]}) is None
