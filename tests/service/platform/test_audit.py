"""The audit has who changed what, is append-only, paged and visible to administrators of the project."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError

from foreshock_service.platform.audit import record
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Alert, AuditEntry
from foreshock_service.platform.keys import Scope, create_key, new_secret
from foreshock_service.platform.security import SERVICE, UNRESTRICTED


def make_key(database: Database, *scopes: Scope, project: str | None = None) -> tuple[str, dict[str, str]]:
    """Make a key; return its id and the header that carries it."""
    secret = new_secret()
    key = database.write(lambda session: create_key(session, secret, "test", project, scopes))
    return key.id, {"Authorization": f"Bearer {secret}"}


def entries(http: httpx.Client, headers: dict[str, str], **query: str | int) -> list[dict[str, object]]:
    answer = http.get("/v1/audit", headers=headers, params=query)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, object]] = answer.json()["items"]
    return items


def start_run(http: httpx.Client, headers: dict[str, str], project: str = "team") -> str:
    body = {"key": "a run", "project": project, "initial_learning_rate": 1e-6}
    run = str(http.post("/v1/runs", json=body, headers=headers).json()["id"])
    http.post(f"/v1/runs/{run}/attempts", json={"key": "first"}, headers=headers).raise_for_status()
    return run


def add_alert(database: Database, run: str) -> str:
    """Store an open alert of the run."""
    alert = Alert(
        id="alert_00000000000000000000000000", run_id=run, attempt=1, rule="k3_high", step=3, severity="warning",
        value=1.0, threshold=0.5, why="", what_to_do="", moves_learning_rate=False, evidence={}, state="open",
        cleared_step=None, changed_by="detector", version=1, opened_at_us=1, changed_at_us=1,
    )  # fmt: skip
    database.write(lambda session: session.add(alert))
    return "alert_00000000000000000000000000"


def test_every_decision_of_a_person_is_recorded_with_its_key(http: httpx.Client, database: Database) -> None:
    key_id, admin = make_key(database, Scope.ADMIN)
    run = start_run(http, admin)
    alert = add_alert(database, run)
    http.patch(f"/v1/runs/{run}", json={"advice_mode": "apply", "name": "n"}, headers=admin).raise_for_status()
    http.post(f"/v1/runs/{run}/alerts/{alert}/acknowledge", headers=admin).raise_for_status()
    http.post(f"/v1/runs/{run}/alerts/{alert}/resolve", headers=admin).raise_for_status()
    body = {"kind": "hold", "reason": "we look at it"}
    http.post(f"/v1/runs/{run}/lr-advice/decisions", json=body, headers=admin).raise_for_status()
    # Not a decision about the rules, the advice or the data.
    http.patch(f"/v1/runs/{run}", json={"advice_mode": "apply", "state": "finished"}, headers=admin).raise_for_status()
    http.delete(f"/v1/runs/{run}", headers=admin).raise_for_status()
    found = entries(http, admin)
    assert [entry["action"] for entry in found] == [
        "run.delete", "advice.hold", "alert.resolve", "alert.acknowledge", "run.update"
    ]  # fmt: skip
    assert {entry["actor"] for entry in found} == {key_id}
    assert {(entry["project"], entry["run_id"]) for entry in found} == {("team", run)}
    by_action = {entry["action"]: entry for entry in found}
    assert by_action["run.update"]["before"] == {"advice_mode": "shadow"}
    assert by_action["run.update"]["after"] == {"advice_mode": "apply"}
    assert by_action["alert.acknowledge"]["subject"] == alert
    assert by_action["alert.acknowledge"]["after"] == {"state": "acknowledged"}
    assert by_action["advice.hold"]["after"] == {"revision": 2, "scale": 1.0, "reason": "we look at it"}
    assert by_action["advice.hold"]["before"] == {"revision": 1, "scale": 1.0}


def test_refused_change_is_not_recorded(http: httpx.Client, database: Database) -> None:
    _, admin = make_key(database, Scope.ADMIN)
    run = start_run(http, admin)
    assert http.post(f"/v1/runs/{run}/alerts/alert_none/resolve", headers=admin).status_code in (404, 422)
    answer = http.post(f"/v1/runs/{run}/lr-advice/decisions", json={"kind": "release", "reason": "x"}, headers=admin)
    assert answer.status_code == 409
    assert entries(http, admin) == []


def test_only_administrators_read_it_and_those_of_a_project_only_its_entries(
    http: httpx.Client, database: Database
) -> None:
    _, everything = make_key(database, Scope.ADMIN)
    _, ours = make_key(database, Scope.ADMIN, project="ours")
    _, ingest = make_key(database, Scope.INGEST, Scope.READ, Scope.WORKER)
    for project in ("ours", "theirs"):
        run = start_run(http, everything, project)
        http.delete(f"/v1/runs/{run}", headers=everything).raise_for_status()
    assert http.get("/v1/audit", headers=ingest).status_code == 403
    assert http.get("/v1/audit").status_code == 401
    assert len(entries(http, everything)) == 2
    assert [entry["project"] for entry in entries(http, ours)] == ["ours"]


def test_entries_are_paged_and_filtered(http: httpx.Client, database: Database) -> None:
    _, admin = make_key(database, Scope.ADMIN)
    for number in range(5):
        author = replace(UNRESTRICTED, without_key=f"console:{number % 2}")
        database.write(lambda session, author=author: record(session, author, "key.create", "key_1"))  # type: ignore[misc]
    first = http.get("/v1/audit", headers=admin, params={"limit": 3}).json()
    second = http.get("/v1/audit", headers=admin, params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [len(page["items"]) for page in (first, second)] == [3, 2]
    assert second.get("next_cursor") is None
    seen = [entry["id"] for page in (first, second) for entry in page["items"]]
    assert seen == [entry["id"] for entry in entries(http, admin)]
    assert len(set(seen)) == 5
    assert len(entries(http, admin, actor="console:0")) == 3
    assert entries(http, admin, action="run.delete") == []


@pytest.mark.parametrize("change", ["UPDATE audit_entries SET actor = 'someone else'", "DELETE FROM audit_entries"])
def test_an_entry_can_be_neither_changed_nor_deleted(database: Database, change: str) -> None:
    database.write(lambda session: record(session, SERVICE, "key.create", "key_1"))
    with pytest.raises(DatabaseError, match="append-only"):
        database.write(lambda session: session.execute(sa.text(change)))
    with database.read() as session:
        assert session.query(AuditEntry).one().actor == "service"


def test_no_secret_is_in_the_audit(http: httpx.Client, database: Database) -> None:
    _, admin = make_key(database, Scope.ADMIN)
    run = start_run(http, admin)
    http.delete(f"/v1/runs/{run}", headers=admin).raise_for_status()
    text = json.dumps(entries(http, admin))
    assert "fsk_" not in text
    assert admin["Authorization"].removeprefix("Bearer ") not in text
