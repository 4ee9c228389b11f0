"""The audit: one line in the log for each change that a person or a key makes."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import httpx
import pytest

from foreshock_service.maintenance import keys as console
from foreshock_service.platform.audit import on_stderr, record
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import SERVICE, Scope
from tests.service.keys import make_key
from tests.service.sending import Sender, make_batch, start_run
from tests.service.stored import add_alert
from tests.service.working import announce_checkpoint, ask_for_probe

STEP = 3


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The lines of the audit, as a service with JSON logs writes them."""
    written = io.StringIO()
    with redirect_stderr(written), on_stderr("json"):
        yield written


@pytest.fixture
def run(http: httpx.Client, database: Database) -> Sender:
    """A run with a closed step, a checkpoint and a probe, sent with a key that may do everything."""
    key, headers = make_key(database, Scope.ADMIN)
    http.headers.update(headers | {"X-Key-Id": key})
    sender = start_run(http)
    sender.put_shard(STEP, make_batch(6)).raise_for_status()
    announce_checkpoint(sender, STEP)
    return sender


def test_every_change_by_a_person_or_key_logs_one_line(run: Sender, database: Database, log: io.StringIO) -> None:
    alert, probe = add_alert(database, run.run, STEP), ask_for_probe(run, STEP).json()["id"]
    decision = {"kind": "hold", "reason": "we look at it"}
    made: list[tuple[str, str, Any, str, str]] = [
        ("PATCH", "", {"advice_mode": "apply", "name": "n"}, "run.update", run.run),
        ("POST", f"/alerts/{alert}/acknowledge", None, "alert.acknowledge", alert),
        ("POST", f"/alerts/{alert}/resolve", None, "alert.resolve", alert),
        ("POST", "/advice/decisions", decision, "advice.hold", run.run),
        ("PUT", "/probe-policy", {"every_steps": 10}, "probe-policy.set", run.run),
    ]
    for method, path, body, _, _ in made:
        run.http.request(method, f"/v1/runs/{run.run}{path}", json=body).raise_for_status()
    run.http.delete(f"/v1/probes/{probe}").raise_for_status()
    run.http.delete(f"/v1/runs/{run.run}").raise_for_status()
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(line["action"], line["object"]) for line in lines] == [
        *((action, subject) for *_, action, subject in made),
        ("probe.cancel", probe),
        ("run.delete", run.run),
    ]
    for line in lines:
        assert (line["key"], line["run"], line["level"]) == (run.http.headers["X-Key-Id"], run.run, "info")
        assert len(line["request_id"]) == 32
        assert f"key={line['key']} action={line['action']} object={line['object']}" in line["message"]
        assert run.http.headers["Authorization"].removeprefix("Bearer ") not in json.dumps(line)
    by_action = {line["action"]: line for line in lines}
    assert (by_action["run.update"]["before"], by_action["run.update"]["after"]) == (
        '{"advice_mode": "shadow"}',
        '{"advice_mode": "apply"}',
    )
    assert json.loads(by_action["advice.hold"]["after"])["reason"] == "we look at it"


def test_refused_and_rolled_back_changes_are_not_logged(run: Sender, database: Database, log: io.StringIO) -> None:
    url = f"/v1/runs/{run.run}"
    assert run.http.post(f"{url}/alerts/alert_none/resolve").status_code in (404, 422)
    assert run.http.post(f"{url}/advice/decisions", json={"kind": "release", "reason": "x"}).status_code == 409
    # Not a change of the rules, the advice or the data.
    run.http.patch(url, json={"advice_mode": "shadow", "state": "finished"}).raise_for_status()

    def fail(session: Any) -> None:
        record(session, SERVICE, "key.create", "key_1")
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        database.write(fail)
    assert log.getvalue() == ""


def test_changes_of_keys_are_on_stderr(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORESHOCK_DATABASE_URL", database_url)
    console.create("trainer", "math", ["ingest"], None)
    shown = capsys.readouterr()
    key, secret = shown.out.split(":")[0], shown.out.split()[-1]
    console.rotate(key, 1.0)
    console.revoke(key)
    lines = [*shown.err.splitlines(), *capsys.readouterr().err.splitlines()]
    for line, action in zip(lines, ("key.create", "key.rotate", "key.revoke"), strict=True):
        assert f"action={action} object={key} project=math" in line
        assert "key=console:" in line
        assert secret not in line
