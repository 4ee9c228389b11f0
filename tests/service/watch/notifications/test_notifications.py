"""One message per episode, retried; no secret and no redirect."""

import gzip
import json
import logging
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from foreshock.errors import ConfigurationError
from foreshock_service.maintenance.delete_runs import delete_rows_of_deleted_runs
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import tables
from foreshock_service.platform.settings import load_settings
from foreshock_service.runs.runs import mark_stale_runs
from foreshock_service.serving import serve
from foreshock_service.watch.advance import mark_waiting_runs
from foreshock_service.watch.detection.derivation import mark_outdated
from foreshock_service.watch.notifications import sending, service
from foreshock_service.watch.notifications.service import fill_outbox, notifiers, send_next
from tests.ports import free_port
from tests.service.sending import make_batch
from tests.service.watch.notifications.conftest import Alerting
from tests.service.watch.recorded import K3, RecordedRun
from tests.waiting import wait_until


def outbox(alerting: Alerting) -> list[tables.Notification]:
    made = tables.Notification
    with alerting.context.database.read() as session:
        return list(session.scalars(select(made).order_by(made.created_at_us, made.id)))


def make_due(alerting: Alerting) -> None:
    """Let the time of the backoff pass."""
    alerting.context.database.write(lambda session: session.execute(update(tables.Notification).values(due_at_us=0)))


def test_an_alert_is_sent_once_when_it_opens_and_once_when_it_is_resolved(alerting: Alerting) -> None:
    told = alerting.target(resolved=True)
    alert = alerting.open()
    for _ in range(3):
        alerting.notify(told)
    ((path, _, body),) = alerting.receiver.requests
    assert path == "/hooks/secret-token"
    assert (body["title"], body["type"]) == ("warning: client_losses at step 1 of my run", "warning")
    headline, *_, address = body["message"].splitlines()
    assert headline == alerting.sender.get("diagnosis").json()["headline"]
    page = f"{alerting.context.settings.page_root}/runs/team-a/my%20run"
    assert address == page
    assert alerting.sender.http.get(page.removeprefix(alerting.context.settings.page_root)).status_code == 200
    alerting.change(alert, "acknowledge")
    alerting.notify(told)
    assert len(alerting.receiver.requests) == 1
    alerting.change(alert, "resolve")
    for _ in range(3):
        alerting.notify(told)
    assert alerting.titles[1:] == ["resolved: client_losses at step 1 of my run"]
    assert alerting.receiver.bodies[1]["type"] == "success"


def test_target_chooses_alerts_by_severity_and_project_and_whether_it_hears_their_end(alerting: Alerting) -> None:
    alert = alerting.open()
    alerting.notify(alerting.target(name="a", severity="critical", verdicts=True))
    alerting.notify(alerting.target(name="b", projects=("team-b",)))
    assert alerting.receiver.requests == []
    alerting.notify(alerting.target(name="c", severity="info", projects=("team-a",)))
    assert len(alerting.receiver.requests) == 1
    alerting.change(alert, "resolve")
    alerting.notify(alerting.target(name="c"))
    # Nor is an alert that ended before it was seen.
    alerting.notify(alerting.target(name="d", resolved=True))
    assert len(alerting.receiver.requests) == 1


def test_a_refused_message_is_sent_again_later(alerting: Alerting, caplog: pytest.LogCaptureFixture) -> None:
    alerting.receiver.answers = [500, 429]
    alerting.open()
    with caplog.at_level(logging.DEBUG):
        for tries in (1, 2):
            alerting.notify(alerting.target())
            (row,) = outbox(alerting)
            assert (row.state, row.tries) == ("pending", tries)
            assert row.due_at_us > row.created_at_us
            make_due(alerting)
        alerting.notify(alerting.target())
    assert outbox(alerting)[0].state == "sent"
    assert len(alerting.receiver.requests) == 3
    assert "target team did not take a message, it is sent again: Failed to send JSON POST notification" in caplog.text
    assert "error=500" in caplog.text
    assert "secret-token" not in caplog.text


def test_a_message_is_given_up_after_a_day(alerting: Alerting, caplog: pytest.LogCaptureFixture) -> None:
    alerting.receiver.answers = [404] * 5
    alerting.open()
    fill_outbox(alerting.context, alerting.target())
    old = update(tables.Notification).values(created_at_us=tables.Notification.created_at_us - 24 * 3600 * 1_000_000)
    alerting.context.database.write(lambda session: session.execute(old))
    send_next(alerting.context, alerting.target())
    assert outbox(alerting)[0].state == "failed"
    assert "it is given up: Failed to send JSON POST notification" in caplog.text


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_no_call_of_the_api_takes_an_address_to_call(app: FastAPI) -> None:
    # Webhooks are the operator's settings: a trainer cannot make the service call into its own network.
    document = app.openapi()
    bodies = {
        content["schema"]["$ref"].rsplit("/", 1)[1]
        for path in document["paths"].values()
        for call in path.values()
        for content in call.get("requestBody", {}).get("content", {}).values()
        if "$ref" in content["schema"]
    }
    names = {name for body in bodies for name in document["components"]["schemas"][body].get("properties", {})}
    names |= {each["name"] for path in document["paths"].values() for call in path.values()
              for each in call.get("parameters", ())}  # fmt: skip
    assert {"key", "step", "wait"} <= names
    names.remove("tracker_url")  # A link of the run's page, which the service never follows.
    assert not [name for name in names if any(part in name.lower() for part in ("url", "uri", "address", "webhook"))]


def test_answer_in_an_encoding_is_not_decoded() -> None:
    bomb = httpx.ByteStream(gzip.compress(bytes(10_000_000)))
    shown = sending._start_of(httpx.Response(500, headers={"Content-Encoding": "gzip"}, stream=bomb))
    assert len(shown) <= 200


def test_a_redirect_is_not_followed(alerting: Alerting) -> None:
    alerting.receiver.answers = [302]
    alerting.open()
    alerting.notify(alerting.target())
    assert [path for path, _, _ in alerting.receiver.requests] == ["/hooks/secret-token"]
    assert "error=302" in str(outbox(alerting)[0].error)
    # Neither by a parameter of the URL, nor for an Alertmanager.
    alerting.receiver.answers = [302, 302]
    alerting.notify(alerting.target(name="b", url=f"json://{alerting.receiver.host}/hooks/b?redirect=yes"))
    alerting.notify(alerting.target(name="c", url=f"alertmanager://{alerting.receiver.host}/hooks"))
    assert [path for path, _, _ in alerting.receiver.requests[1:]] == ["/hooks/b", "/hooks/api/v2/alerts"]
    assert "redirects" in str(outbox(alerting)[-1].error)


def test_a_target_that_does_not_answer_ends_in_a_timeout(alerting: Alerting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_SECONDS", 0.3)
    alerting.open()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        alerting.notify(alerting.target(name="a", url=f"json://{host}/secret-token"))
        alerting.notify(alerting.target(name="b", url=f"alertmanager://{host}/secret-token"))
    first, second = outbox(alerting)
    assert (first.state, second.state) == ("pending", "pending")
    assert str(first.error).startswith("A Connection error occurred")
    assert str(second.error).startswith("ReadTimeout")


def test_the_outbox_survives_a_process_that_dies_while_sending(
    alerting: Alerting, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    alerting.open()
    with monkeypatch.context() as patch:
        patch.setattr(service, "send", die)
        with pytest.raises(Killed):
            alerting.notify(alerting.target())
    alerting.notify(alerting.target())
    assert len(alerting.receiver.requests) == 1


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_several_processes_send_a_message_once(alerting: Alerting) -> None:
    alerting.open()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(alerting.notify, [alerting.target()] * 8))
    assert len(alerting.receiver.requests) == 1


def test_no_part_of_the_url_is_logged_or_stored(alerting: Alerting, caplog: pytest.LogCaptureFixture) -> None:
    hidden = ("secret-user", "secret-password", "secret-path", "secret-header", "secret-bearer")
    url = f"json://secret-user:secret-password@{alerting.receiver.host}/secret-path?+X-Token=secret-header"
    alerting.receiver.answers = [500, 401, 500, 401]
    alerting.open()
    told = (
        alerting.target(name="a", url=url, resolved=True),
        alerting.target(name="b", url=f"alertmanager://{alerting.receiver.host}/secret-path", token="secret-bearer"),
    )
    with caplog.at_level(logging.DEBUG):
        for each in told * 3:
            alerting.notify(each)
            stored = [str(row.error) for row in outbox(alerting)]
            assert not [secret for secret in hidden if secret in " ".join(stored) + caplog.text]
            make_due(alerting)
    assert [row.error for row in outbox(alerting)] == [None, None]
    headers = {path: headers for path, headers, _ in alerting.receiver.requests}
    assert headers["/secret-path"]["x-token"] == "secret-header"
    assert headers["/secret-path/api/v2/alerts"]["authorization"] == "Bearer secret-bearer"


def test_a_deleted_run_sends_nothing(alerting: Alerting) -> None:
    alerting.open()
    fill_outbox(alerting.context, alerting.target())
    alerting.sender.http.delete(f"/v1/runs/{alerting.sender.run}").raise_for_status()
    alerting.notify(alerting.target())
    assert alerting.receiver.requests == []
    assert outbox(alerting)[0].state == "dropped"


def test_the_service_sends_by_itself(alerting: Alerting) -> None:
    told = (alerting.target(), alerting.target(name="b"))
    settings = alerting.context.settings.model_copy(update={"notifications": told})
    threads = notifiers(replace(alerting.context, settings=settings))
    alerting.open()
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(alerting.receiver.requests) >= 2)
    finally:
        for thread in threads:
            thread.stop()
    assert len(alerting.receiver.requests) == 2


def configure(monkeypatch: pytest.MonkeyPatch, *targets: dict[str, Any]) -> None:
    monkeypatch.setenv("FORESHOCK_NOTIFICATIONS", json.dumps(targets))


SLACK = {"name": "oncall", "url": "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevixyz"}


def test_settings_show_the_name_and_never_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, SLACK)
    settings = load_settings()
    assert settings.printable()["FORESHOCK_NOTIFICATIONS"] == "oncall"
    assert "xyz" not in repr(settings) + str(settings.printable())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "xyz"}, "FORESHOCK_NOTIFICATIONS: target 2: url must be a URL of Apprise"),
        ({"url": "alertmanager://user:xyz@host/"}, "must not hold a user or password"),
        ({"token": "xyz"}, "token is for Alertmanager only"),
        ({"severity": "high"}, "Input should be 'info', 'warning' or 'critical'"),
        ({"adress": "xyz"}, "target 2: adress is unknown; a target has name, url, token,"),
        ({"url": None}, "FORESHOCK_NOTIFICATIONS: target 2: url is required"),
        ({"projects": ["xyz", 1]}, "FORESHOCK_NOTIFICATIONS: target 2: projects.1: Input should be a valid string"),
    ],
)
def test_an_invalid_target_is_an_error_without_its_secret(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    given = {name: value for name, value in (SLACK | {"name": "second"} | fields).items() if value is not None}
    configure(monkeypatch, SLACK, given)
    with pytest.raises(ConfigurationError) as raised:
        load_settings()
    assert message in str(raised.value)
    assert "xyz" not in str(raised.value)


def test_url_that_apprise_does_not_know_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    configure(monkeypatch, SLACK, {"name": "odd", "url": "nope://xyz"})
    with pytest.raises(ConfigurationError, match="target odd: its url is not one of Apprise") as raised:
        serve()
    assert "xyz" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_apprise_is_not_imported_without_a_target_of_its_own() -> None:
    code = "import sys; from foreshock_service.app import create_app; print('apprise' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_two_targets_of_one_name_and_broken_json_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, SLACK, SLACK)
    with pytest.raises(ConfigurationError, match="each target needs a name of its own, got oncall, oncall"):
        load_settings()
    monkeypatch.setenv("FORESHOCK_NOTIFICATIONS", '[{"url": "https://xyz"')
    with pytest.raises(ConfigurationError, match="notifications") as raised:
        load_settings()
    assert "xyz" not in str(raised.value)


def test_the_command_sends_a_test_message(
    monkeypatch: pytest.MonkeyPatch, alerting: Alerting, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(monkeypatch, {"name": "team", "url": f"json://{alerting.receiver.host}/x"}, SLACK)
    sending.show_targets()
    assert capsys.readouterr().out == "team\twarning\tevery project\noncall\twarning\tevery project\n"
    sending.send_test("team")
    assert capsys.readouterr().out == "team took the message\n"
    assert alerting.titles == ["warning: test at step 0 of test"]
    with pytest.raises(ConfigurationError, match="there is no target nobody; targets: team, oncall"):
        sending.send_test("nobody")
    configure(monkeypatch, {"name": "away", "url": f"json://127.0.0.1:{free_port()}/secret-token"})
    with pytest.raises(ConfigurationError, match="target away did not take the message: A Connection error") as raised:
        sending.send_test("away")
    assert "secret-token" not in str(raised.value)


def test_one_message_for_an_episode_unless_it_grows_worse(alerting: Alerting) -> None:
    run = RecordedRun(alerting.context.database).begin("mismatch")
    # The baseline is half of the level that is critical: the rules on k3 fire one after the other, for one cause.
    run.close_all({K3: [5e-3] * 20}, range(1, 21))
    alerting.notify(alerting.target())
    run.close_all({K3: [0.3] * 20}, range(21, 41))
    for _ in range(2):
        alerting.notify(alerting.target())
    rules = {alert.rule: alert.severity for alert in run.alerts()}
    assert len(rules) >= 4
    assert [body["type"] for body in alerting.receiver.bodies] == ["warning", "failure"]
    # A new episode has a message of its own.
    run.close_all({K3: [1e-4] * 8 + [0.3] * 60}, range(41, 109))
    alerting.notify(alerting.target())
    assert [body["type"] for body in alerting.receiver.bodies] == ["warning", "failure", "failure"]


def test_a_changed_verdict_is_told_once_with_its_headline_to_targets_that_ask(alerting: Alerting) -> None:
    told = alerting.target(verdicts=True, resolved=True)
    alert = alerting.open()
    for _ in range(3):
        alerting.notify(told)
    assert sorted(alerting.titles) == ["warning: client_losses at step 1 of my run", "warning: my run"]
    said = alerting.sender.get("diagnosis").json()
    (verdict,) = [each for each in alerting.receiver.bodies if each["title"] == "warning: my run"]
    assert verdict["message"].splitlines()[0] == said["headline"]
    # A later step changes the diagnosis and not its verdict.
    alerting.sender.put_shard(2, make_batch(seed=2)).raise_for_status()
    alerting.notify(told)
    assert len(alerting.receiver.requests) == 2
    alerting.change(alert, "resolve")
    for _ in range(2):
        alerting.notify(told)
    assert sorted(alerting.titles[2:]) == ["resolved: client_losses at step 1 of my run", "unknown: my run"]


def test_each_silence_of_a_run_is_told(alerting: Alerting) -> None:
    sender, context = alerting.sender, alerting.context
    # A run that logs scalars only: each silence is at the same step.
    sender.put_scalars(1, {"reward": 1.0}).raise_for_status()
    told = alerting.target(resolved=True)
    for _ in range(3):
        sender.http.put(f"/v1/runs/{sender.run}/attempts/1/clients/a", json={}).raise_for_status()
        alerting.notify(told)
        context.database.write(lambda session: session.execute(update(tables.Run).values(seen_at_us=0)))
        mark_stale_runs(context, 0)
        alerting.notify(told)
    stale = [f"{word}: stale_run at step 0 of my run" for word in ("warning", "resolved")]
    assert alerting.titles == [*stale, *stale, stale[0]]


def test_verdict_that_was_obsolete_before_it_was_sent_is_told_when_it_returns(alerting: Alerting) -> None:
    told = alerting.target(verdicts=True, severity="warning")

    def verdicts() -> list[str]:
        return [title for title in alerting.titles if title.endswith(": my run")]

    alert = alerting.open()
    fill_outbox(alerting.context, told)
    alerting.change(alert, "resolve")
    alerting.notify(told)
    assert verdicts() == []
    # Another loss: the run is in warning again.
    body = {"rejected": 4}
    alerting.sender.http.put(f"/v1/runs/{alerting.sender.run}/attempts/1/clients/a", json=body).raise_for_status()
    for _ in range(2):
        alerting.notify(told)
    assert verdicts() == ["warning: my run"]


def test_message_is_kept_as_long_as_its_run(alerting: Alerting) -> None:
    told = alerting.target(name="am", url=f"alertmanager://{alerting.receiver.host}")
    alerting.open()
    alerting.notify(told)
    old = update(tables.Notification).values(created_at_us=0, due_at_us=0)
    alerting.context.database.write(lambda session: session.execute(old))
    alerting.sender.put_shard(2, make_batch(seed=2), shard=0, shards=2).raise_for_status()
    alerting.context.database.write(lambda session: session.execute(update(tables.Step).values(last_shard_at_us=0)))
    # Another alert, whose message is added to the outbox.
    mark_waiting_runs(alerting.context)
    alerting.notify(told)
    names = [each["labels"]["alertname"] for body in alerting.receiver.bodies for each in body]
    assert sorted(names) == ["ForeshockClientLosses", "ForeshockClientLosses", "ForeshockIncompleteStep"]
    alerting.sender.http.delete(f"/v1/runs/{alerting.sender.run}").raise_for_status()
    delete_rows_of_deleted_runs(alerting.context)
    assert outbox(alerting) == []


def test_a_target_hears_nothing_old_of_runs_that_have_ended(alerting: Alerting) -> None:
    alerting.open()
    alerting.sender.http.patch(f"/v1/runs/{alerting.sender.run}", json={"state": "failed"}).raise_for_status()
    assert fill_outbox(alerting.context, alerting.target(verdicts=True)) == 0


def test_what_happened_just_before_the_service_died_is_told_by_the_next_one(alerting: Alerting) -> None:
    told = alerting.target(verdicts=True)
    assert fill_outbox(alerting.context, told) == 0
    # The service dies before its next look, and the run has ended.
    alerting.open()
    alerting.sender.http.patch(f"/v1/runs/{alerting.sender.run}", json={"state": "failed"}).raise_for_status()
    settings = alerting.context.settings.model_copy(update={"notifications": (told,)})
    (thread,) = notifiers(replace(alerting.context, settings=settings))
    thread.run_round()
    assert len(alerting.receiver.requests) == 2


def judge_again(context: ServiceContext) -> None:
    """Start as after an upgrade: every state and diagnosis is of an earlier release."""

    def work(session: Session) -> None:
        session.execute(update(tables.DetectorSnapshot).values(configuration_digest="older"))
        session.execute(update(tables.StoredDiagnosis).values(judged_by="older"))

    context.database.write(work)
    mark_outdated(context.database)
    mark_waiting_runs(context)


def test_an_upgrade_tells_nobody(alerting: Alerting) -> None:
    context, told = alerting.context, alerting.target(resolved=True, verdicts=True, severity="info")
    missed, gone = RecordedRun(context.database).begin("missed"), RecordedRun(context.database).begin("gone")
    for run in (missed, gone):
        run.close_all({K3: [1e-4] * 20 + [0.3] * 20}, range(1, 41))
    alerting.notify(told)
    before = len(alerting.receiver.requests)
    assert {"critical: gone", "critical: missed"} <= set(alerting.titles)

    def as_an_earlier_release_judged(session: Session) -> None:
        # It found nothing in one run, and something in the other that this release does not find.
        for table in (tables.Notification, tables.Alert, tables.StoredDiagnosis):
            session.execute(delete(table).where(table.run_id == missed.run))
        low = tables.measurements.update().where(tables.measurements.c.run_id == gone.run).values(k3_kl=1e-4)
        session.execute(low)

    context.database.write(as_an_earlier_release_judged)
    judge_again(context)
    assert {alert.state for alert in missed.alerts()} == {"open"}
    assert {alert.state for alert in gone.alerts()} == {"retracted"}
    for _ in range(2):
        alerting.notify(told)
    assert len(alerting.receiver.requests) == before
    # What new steps show is told.
    gone.close_all({K3: [0.3] * 20}, range(41, 61))
    missed.close_all({K3: [1e-4] * 40 + [0.3] * 20}, range(41, 101))
    alerting.notify(told)
    new = alerting.titles[before:]
    for key in ("gone", "missed"):
        assert f"critical: {key}" in new
        assert [title for title in new if title.startswith("critical: mismatch") and title.endswith(key)]
