"""Clients of two projects, each with a key of its own, share a spool folder and never hold each other up."""

from pathlib import Path

import pytest

from foreshock import Client
from foreshock.client.connection import ServiceConnection
from foreshock.errors import ServiceUnavailable
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import Scope, revoke_key
from tests.service.keys import make_key
from tests.service.server import RunningServer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def key_of(database: Database, project: str) -> tuple[str, str]:
    key, headers = make_key(database, Scope.INGEST, Scope.READ, project=project)
    return key, headers["Authorization"].removeprefix("Bearer ")


def client(url: str, spool: Path, project: str, key: str) -> Client:
    return Client(url, api_key=key, project=project, run_key="run", spool_directory=spool, timeout_seconds=20)


def leave_behind(url: str, spool: Path, project: str, key: str) -> None:
    """Leave scalars of a client whose service was away."""

    def away(*_: object, **__: object) -> None:
        raise ServiceUnavailable("away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServiceConnection, "request", away)
        left = client(url, spool, project, key)
        left.log_scalars(1, {"x": 1.0})
        assert left.close(0.1).undelivered


@pytest.mark.parametrize("revoked", [False, True], ids=["valid key", "revoked key"])
def test_spool_of_another_projects_key_holds_nothing_up(
    server: RunningServer, database: Database, tmp_path: Path, revoked: bool
) -> None:
    spool = tmp_path / "spool"
    (left_id, left_key), (_, own_key) = key_of(database, "theirs"), key_of(database, "ours")
    leave_behind(server.url, spool, "theirs", left_key)
    if revoked:
        database.write(lambda session: revoke_key(session, left_id))
    ours = client(server.url, spool, "ours", own_key)
    ours.log_scalars(1, {"x": 2.0})
    status = ours.flush(60)
    assert status.complete, status
    assert ours.counters.snapshot().rejected == 0
    ours.close()
    assert list(spool.glob("*/*.item")), "what the other project left is still there"
    if not revoked:
        theirs = client(server.url, spool, "theirs", left_key)
        assert theirs.flush(60).complete
        assert theirs.counters.snapshot().recovered > 0
        theirs.close()
        assert not list(spool.glob("*/*.item"))


def test_next_key_of_the_project_sends_what_was_left(server: RunningServer, database: Database, tmp_path: Path) -> None:
    (old_id, old_key), (_, new_key) = key_of(database, "ours"), key_of(database, "ours")
    leave_behind(server.url, tmp_path / "spool", "ours", old_key)
    database.write(lambda session: revoke_key(session, old_id))
    again = client(server.url, tmp_path / "spool", "ours", new_key)
    again.log_scalars(2, {"x": 2.0})
    assert again.flush(60).complete
    assert again.counters.snapshot().recovered > 0
    again.close()
    assert not list((tmp_path / "spool").glob("*/*.item"))
