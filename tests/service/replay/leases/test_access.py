"""Keys of probes: a worker of one project gets that project's jobs only, and each call needs its scope."""

from __future__ import annotations

import httpx
import pytest

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.keys import Scope
from tests.service.keys import make_key
from tests.service.working import STEP, ask_for_lease, ask_for_probe, lease_request, run_to_probe


def test_projects_do_not_see_each_others_jobs(http: httpx.Client, database: Database) -> None:
    run = run_to_probe(http, STEP, project="ours")
    probe = ask_for_probe(run, STEP).raise_for_status().json()["id"]
    theirs, ours = (make_key(database, Scope.WORKER, Scope.READ, project=name)[1] for name in ("theirs", "ours"))
    assert http.post("/v1/leases", json=lease_request(), headers=theirs).status_code == 204
    lease = http.post("/v1/leases", json=lease_request(), headers=ours).json()
    assert lease["job"]["probe"] == probe
    assert "foreshock_step" not in http.get("/metrics", headers=theirs).text
    assert "foreshock_step{" in http.get("/metrics", headers=ours).text
    assert len(http.get("/v1/hardware", headers=theirs).json()["workers"]) == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_each_call_needs_its_scope(http: httpx.Client, database: Database) -> None:
    run = run_to_probe(http, STEP)
    probe = ask_for_probe(run, STEP).raise_for_status().json()["id"]
    policy = f"/v1/runs/{run.run}/probe-policy"
    calls = (
        ("POST", "/v1/leases", lease_request(), Scope.WORKER),
        ("PUT", policy, {"every_steps": 10}, Scope.ADMIN),
        ("GET", policy, None, Scope.READ),
        ("DELETE", f"/v1/probes/{probe}", None, Scope.INGEST),
        ("GET", "/metrics", None, Scope.READ),
    )
    keys = {scope: make_key(database, scope)[1] for scope in Scope}
    assert ask_for_lease(http).status_code == 401
    for method, path, body, needed in calls:
        for other in set(Scope) - {needed, Scope.ADMIN}:
            assert http.request(method, path, json=body, headers=keys[other]).status_code == 403, (method, path, other)
        assert http.request(method, path, json=body, headers=keys[needed]).is_success, (method, path)
