"""Keys: a worker of one project gets that project's jobs only, and a reader's key gets none."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.keys import Scope, create_key, new_secret
from tests.service.sending import Sender, make_batch, start_run
from tests.service.server import RunningServer
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe


def client_with_key(server: RunningServer, app: FastAPI, project: str | None, *scopes: Scope) -> httpx.Client:
    """A client with a key of its own."""
    context: ServiceContext = app.state.context
    secret = new_secret()
    context.database.write(lambda session: create_key(session, secret, "a key", project, scopes))
    return httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {secret}"})


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run of the project `ours`, with a probe that waits."""
    sender = start_run(http, project="ours")
    sender.put_shard(1, make_batch(2)).raise_for_status()
    announce_checkpoint(sender, 1)
    ask_for_probe(sender, 1).raise_for_status()
    return sender


def test_projects_do_not_see_each_others_jobs(server: RunningServer, app: FastAPI, run: Sender) -> None:
    with (
        client_with_key(server, app, "theirs", Scope.WORKER, Scope.READ) as theirs,
        client_with_key(server, app, "ours", Scope.WORKER, Scope.READ) as ours,
    ):
        assert ask_for_lease(theirs).status_code == 204
        lease = ask_for_lease(ours).json()
        foreign = theirs.post(f"/v1/leases/{lease['lease']}/heartbeat", json={"token": lease["token"]})
        assert foreign.status_code == 404
        assert theirs.get(f"/v1/probes/{lease['job']['probe']}").status_code == 404
        assert ours.get(f"/v1/probes/{lease['job']['probe']}").status_code == 200
        assert "foreshock_step" not in theirs.get("/metrics").text
        assert "foreshock_step{" in ours.get("/metrics").text
        workers = theirs.get("/v1/hardware").json()["workers"]
        assert len(workers) == 1


def test_each_scope_is_required(server: RunningServer, app: FastAPI, run: Sender) -> None:
    with client_with_key(server, app, None, Scope.READ) as reader:
        assert ask_for_lease(reader).status_code == 403
        assert reader.get("/metrics").status_code == 200
        assert reader.post(f"/v1/runs/{run.run}/probes", json={}).status_code in (403, 422)
    with client_with_key(server, app, None, Scope.WORKER) as worker:
        assert ask_for_lease(worker).status_code == 200
        assert worker.get("/metrics").status_code == 403
    assert ask_for_lease(run.http).status_code == 401
