"""A key of one project reaches nothing of another one, by any call of the API, with any scope."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from fastapi.routing import APIRoute

from foreshock.api.records import to_json
from foreshock_service.app import api_routes
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import Scope
from foreshock_service.present.pages.endpoints import ROUTERS as PAGES
from tests.foreshock.certify.making import certificate, row
from tests.service.keys import make_key
from tests.service.sending import make_batch, start_run
from tests.service.working import LeaseHolder, announce_checkpoint, ask_for_lease, ask_for_probe

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

SECRET = "a name that only its project knows"


@pytest.fixture
def theirs(http: httpx.Client, database: Database) -> dict[str, str]:
    """Ids of a run of another project, with a probe and a lease; from then on the service needs keys."""
    sender = start_run(http, key=SECRET, project="theirs", name=SECRET, initial_learning_rate=1e-6)
    sender.put_shard(1, make_batch(4)).raise_for_status()
    batch = make_batch(40)
    copied = replace(batch, trainer_log_probs=batch.rollout_log_probs)
    sender.put_shard(2, copied).raise_for_status()
    assert {each["run_key"] for each in http.get("/v1/findings").json()["items"]} == {SECRET}
    sender.put_scalars(1, {SECRET: 1.0}).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1).raise_for_status()
    holder = LeaseHolder(http, ask_for_lease(http).raise_for_status().json())
    body = to_json(certificate(row("prefill", 0.01), model=SECRET))
    stored = http.post("/v1/certificates", json=body, params={"project": "theirs"}).raise_for_status().json()
    return {
        "certificate": stored["id"], "run": sender.run, "lease": holder.lease["lease"],
        "probe": holder.lease["job"]["probe"], "token": str(holder.token), "step": "1", "shard": "0", "attempt": "1",
        "client": "c", "alert": "alert_00000000000000000000000000",
    }  # fmt: skip


def calls() -> Iterator[tuple[str, str]]:
    """Yield method and path of every call of the API, and of the pages of runs."""
    pages = [route for router in PAGES for route in router.routes if isinstance(route, APIRoute)]
    for route in (*api_routes(), *pages):
        if route.path.startswith(("/v1", "/metrics", "/pages", "/runs", "/certificates")):
            for method in sorted(route.methods):
                yield method, route.path


@pytest.mark.parametrize("scopes", [tuple(Scope), (Scope.ADMIN,), (Scope.READ,), (Scope.WORKER,), (Scope.INGEST,)])
def test_no_call_reaches_another_project(
    http: httpx.Client, database: Database, theirs: dict[str, str], scopes: tuple[Scope, ...]
) -> None:
    headers = make_key(database, *scopes, project="ours")[1] | {"X-Foreshock-Lease-Token": theirs["token"]}
    asked = 0
    for method, path in calls():
        url = path
        for name, value in theirs.items():
            url = url.replace(f"{{{name}}}", value)
        answer = http.request(method, url, headers=headers, params={"wait": 0} if "lr-advice" in path else {})
        assert SECRET not in answer.text, f"{method} {path}"
        if any(f"{{{name}}}" in path for name in ("run", "lease", "probe")):
            assert answer.status_code in (303, 401, 403, 404, 405, 415, 422), f"{method} {path}: {answer.text}"
            if method == "GET" and answer.status_code == 422:
                assert "Field required" in answer.text or "header" in answer.text or "query" in answer.text, answer.text
            asked += 1
    assert asked > 40
    # Nothing was changed: the run is there, with its name, for its own project.
    _, mine = make_key(database, Scope.READ, project="theirs")
    run = http.get(f"/v1/runs/{theirs['run']}", headers=mine).raise_for_status().json()
    assert (run["name"], run["state"], run["advice_mode"]) == (SECRET, "running", "shadow")
