"""One message per episode, retried and leased; no secret and no redirect."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select, update

from foreshock.errors import ConfigurationError
from foreshock_service.platform.database.tables import Notification
from foreshock_service.platform.settings import NotificationTarget, Settings, load_settings
from foreshock_service.watch.notifications import sending
from foreshock_service.watch.notifications.service import fill_outbox, notifiers, send_next
from tests.ports import free_port
from tests.service.sending import make_batch
from tests.service.watch.notifications.conftest import Alerting
from tests.service.watch.notifications.receiver import Receiver
from tests.service.watch.recorded import K3, RecordedRun

Make = Callable[..., NotificationTarget]


def outbox(alerting: Alerting) -> list[Notification]:
    with alerting.context.database.read() as session:
        return list(session.scalars(select(Notification).order_by(Notification.created_at_us, Notification.id)))


def make_due(alerting: Alerting) -> None:
    """Let the time of the backoff, or of a lease, pass."""
    values = {"due_at_us": 0, "leased_until_us": 0}
    alerting.context.database.write(lambda session: session.execute(update(Notification).values(**values)))


def test_an_alert_is_sent_once_when_it_opens_and_once_when_it_is_resolved(
    alerting: Alerting, target: Make, receiver: Receiver
) -> None:
    told = target(resolved=True, token="bearer-secret")
    alert = alerting.open()
    for _ in range(3):
        alerting.notify(told)
    ((path, headers, body),) = receiver.requests
    assert (path, headers["authorization"]) == ("/hooks/secret-token", "Bearer bearer-secret")
    assert (body["change"], body["alert"]["id"], body["alert"]["rule"]) == ("opened", alert, "client_losses")
    assert body["alert"]["severity"] == "warning"
    page = f"{alerting.context.settings.page_root}/runs/team-a/my%20run"
    assert body["run"] == {"id": alerting.sender.run, "key": "my run", "project": "team-a", "page": page}
    assert alerting.sender.http.get(page.removeprefix(alerting.context.settings.page_root)).status_code == 200
    alerting.change(alert, "acknowledge")
    alerting.notify(told)
    assert len(receiver.requests) == 1
    alerting.change(alert, "resolve")
    for _ in range(3):
        alerting.notify(told)
    assert [each["change"] for each in receiver.bodies] == ["opened", "resolved"]


def test_the_end_is_sent_only_to_targets_that_ask_for_it(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    alert = alerting.open()
    alerting.notify(target())
    alerting.change(alert, "resolve")
    alerting.notify(target())
    assert [each["change"] for each in receiver.bodies] == ["opened"]


def test_severity_and_project_choose_the_alerts(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    alerting.open()
    alerting.notify(target(name="a", severity="critical"))
    alerting.notify(target(name="b", projects=("team-b",)))
    assert receiver.requests == []
    alerting.notify(target(name="c", severity="info", projects=("team-a",)))
    assert len(receiver.requests) == 1


def test_an_alert_that_ended_before_it_was_seen_is_not_sent(
    alerting: Alerting, target: Make, receiver: Receiver
) -> None:
    alerting.change(alerting.open(), "resolve")
    alerting.notify(target(resolved=True))
    assert receiver.requests == []


def test_a_refused_message_is_sent_again_later_with_the_same_key(
    alerting: Alerting, target: Make, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [500, 429]
    alerting.open()
    with caplog.at_level(logging.DEBUG):
        for tries in (1, 2):
            alerting.notify(target())
            (row,) = outbox(alerting)
            assert (row.state, row.tries) == ("pending", tries)
            assert row.due_at_us > row.created_at_us
            make_due(alerting)
        alerting.notify(target())
    assert outbox(alerting)[0].state == "sent"
    assert len({headers["idempotency-key"] for _, headers, _ in receiver.requests}) == 1
    assert "target team did not take a message, it is sent again: HTTP 500 no such hook …" in caplog.text
    assert "secret-token" not in caplog.text


def test_a_message_is_given_up_after_a_day(
    alerting: Alerting, target: Make, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [404] * 5
    alerting.open()
    fill_outbox(alerting.context, target())
    old = update(Notification).values(created_at_us=Notification.created_at_us - 24 * 3600 * 1_000_000)
    alerting.context.database.write(lambda session: session.execute(old))
    send_next(alerting.context, target())
    assert outbox(alerting)[0].state == "failed"
    assert "it is given up: HTTP 404" in caplog.text


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
    assert not [name for name in names if any(part in name.lower() for part in ("url", "uri", "address", "webhook"))]


def test_answer_in_an_encoding_is_not_decoded() -> None:
    bomb = httpx.ByteStream(gzip.compress(bytes(10_000_000)))
    shown = sending._start_of(httpx.Response(500, headers={"Content-Encoding": "gzip"}, stream=bomb))
    assert len(shown) <= 200


def test_a_redirect_is_not_followed(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    receiver.answers = [302]
    alerting.open()
    alerting.notify(target())
    assert [path for path, _, _ in receiver.requests] == ["/hooks/secret-token"]
    assert "redirects" in str(outbox(alerting)[0].error)


def test_a_target_that_does_not_answer_ends_in_a_timeout(
    alerting: Alerting, target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "TIMEOUT_SECONDS", 0.3)
    alerting.open()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        alerting.notify(target(url=f"http://127.0.0.1:{silent.getsockname()[1]}/secret-token"))
    (row,) = outbox(alerting)
    assert row.state == "pending"
    assert str(row.error).startswith("ReadTimeout")


def test_the_outbox_survives_a_process_that_died_while_sending(
    alerting: Alerting, target: Make, receiver: Receiver
) -> None:
    alerting.open()
    fill_outbox(alerting.context, target())
    held = {"lease": "of a dead process", "leased_until_us": 2**62}
    alerting.context.database.write(lambda session: session.execute(update(Notification).values(**held)))
    assert not send_next(alerting.context, target())
    make_due(alerting)
    assert send_next(alerting.context, target())
    assert len(receiver.requests) == 1


def test_several_processes_send_a_message_once(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    alerting.open()
    threads = [threading.Thread(target=alerting.notify, args=(target(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receiver.requests) == 1


def test_slack_gets_a_text_without_markup_of_others(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    alerting.open()
    alerting.notify(target(kind="slack"))
    (body,) = receiver.bodies
    page = f"{alerting.context.settings.page_root}/runs/team-a/my%20run"
    assert body["text"].startswith(f"*warning*: client_losses at step 1 of <{page}|my run>\n")
    assert "a &lt;reason&gt;" in body["text"]


def test_a_deleted_run_sends_nothing(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    alerting.open()
    fill_outbox(alerting.context, target())
    alerting.sender.http.delete(f"/v1/runs/{alerting.sender.run}").raise_for_status()
    alerting.notify(target())
    assert receiver.requests == []
    assert outbox(alerting)[0].state == "dropped"


def test_the_service_sends_by_itself(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    settings = alerting.context.settings.model_copy(update={"notifications": (target(), target(name="b"))})
    threads = notifiers(replace(alerting.context, settings=settings))
    alerting.open()
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    try:
        while len(receiver.requests) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for thread in threads:
            thread.stop()
    assert len(receiver.requests) == 2


def configure(monkeypatch: pytest.MonkeyPatch, *targets: dict[str, Any]) -> None:
    monkeypatch.setenv("FORESHOCK_NOTIFICATIONS", json.dumps(targets))


SLACK = {"name": "oncall", "kind": "slack", "url": "https://hooks.slack.invalid/services/T0/B0/xyz"}


def test_settings_show_the_name_and_never_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, SLACK)
    settings = load_settings()
    assert settings.printable()["FORESHOCK_NOTIFICATIONS"] == "oncall (slack)"
    assert "xyz" not in repr(settings) + str(settings.printable())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "ftp://xyz"}, "FORESHOCK_NOTIFICATIONS: target 2: url: must be an http:// or https:// address"),
        ({"url": "https://user:xyz@host/"}, "must not hold a user or password"),
        (
            {"kind": "email"},
            "FORESHOCK_NOTIFICATIONS: target 2: kind: Input should be 'json', 'slack' or 'alertmanager'",
        ),
        ({"severity": "high"}, "Input should be 'info', 'warning' or 'critical'"),
        (
            {"adress": "xyz"},
            "FORESHOCK_NOTIFICATIONS: target 2: adress is unknown; a target has name, kind, url, token,",
        ),
        ({"kind": None}, "FORESHOCK_NOTIFICATIONS: target 2: kind is required"),
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


def test_two_targets_of_one_name_and_broken_json_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, SLACK, SLACK)
    with pytest.raises(ConfigurationError, match="each target needs a name of its own, got oncall, oncall"):
        load_settings()
    monkeypatch.setenv("FORESHOCK_NOTIFICATIONS", '[{"url": "https://xyz"')
    with pytest.raises(ConfigurationError, match="notifications") as raised:
        load_settings()
    assert "xyz" not in str(raised.value)


def test_public_address_must_be_one() -> None:
    assert Settings(public_url="https://foreshock.example/").page_root == "https://foreshock.example"
    with pytest.raises(ValueError, match="http"):
        Settings(public_url="foreshock.example")


def test_the_command_sends_a_test_message(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(monkeypatch, {"name": "team", "kind": "json", "url": f"{receiver.url}/x"}, SLACK)
    sending.show_targets()
    assert capsys.readouterr().out == "team\tjson\twarning\tevery project\noncall\tslack\twarning\tevery project\n"
    sending.send_test("team")
    assert capsys.readouterr().out == "team took the message\n"
    assert receiver.bodies[0]["alert"]["rule"] == "test"
    with pytest.raises(ConfigurationError, match="there is no target nobody; targets: team, oncall"):
        sending.send_test("nobody")
    configure(monkeypatch, {"name": "away", "kind": "json", "url": f"http://127.0.0.1:{free_port()}/secret-token"})
    with pytest.raises(ConfigurationError, match="target away did not take the message: ConnectError") as raised:
        sending.send_test("away")
    assert "secret-token" not in str(raised.value)


def test_one_message_for_an_episode_unless_it_grows_worse(alerting: Alerting, target: Make, receiver: Receiver) -> None:
    run = RecordedRun(alerting.context.database).begin("mismatch")
    # The baseline is half of the level that is critical: the rules on k3 fire one after the other, for one cause.
    run.close_all({K3: [5e-3] * 20}, range(1, 21))
    alerting.notify(target())
    run.close_all({K3: [0.3] * 20}, range(21, 41))
    for _ in range(2):
        alerting.notify(target())
    rules = {alert.rule: alert.severity for alert in run.alerts()}
    assert len(rules) >= 4
    told = [(body["alert"]["rule"], body["alert"]["severity"]) for body in receiver.bodies]
    assert [severity for _, severity in told] == ["warning", "critical"]
    # A new episode has a message of its own.
    run.close_all({K3: [1e-4] * 8 + [0.3] * 60}, range(41, 109))
    alerting.notify(target())
    assert [body["alert"]["severity"] for body in receiver.bodies] == ["warning", "critical", "critical"]


def test_a_changed_verdict_is_told_once_with_its_headline_to_targets_that_ask(
    alerting: Alerting, target: Make, receiver: Receiver
) -> None:
    told = target(verdicts=True, resolved=True)
    alert = alerting.open()
    for _ in range(3):
        alerting.notify(told)
    assert sorted(each["change"] for each in receiver.bodies) == ["opened", "verdict"]
    said = alerting.sender.get("diagnosis").json()
    (verdict,) = [each for each in receiver.bodies if each["change"] == "verdict"]
    assert verdict["diagnosis"] == {"verdict": "warning", "headline": said["headline"]}
    assert verdict["run"]["key"] == "my run"
    # A later step changes the diagnosis and not its verdict.
    alerting.sender.put_shard(2, make_batch(seed=2)).raise_for_status()
    alerting.notify(told)
    assert len(receiver.requests) == 2
    alerting.change(alert, "resolve")
    for _ in range(2):
        alerting.notify(told)
    assert sorted(each["change"] for each in receiver.bodies[2:]) == ["resolved", "verdict"]
    assert [each["diagnosis"]["verdict"] for each in receiver.bodies[2:]] == ["unknown", "unknown"]


def test_a_verdict_below_the_severity_of_the_target_is_not_told(
    alerting: Alerting, target: Make, receiver: Receiver
) -> None:
    alerting.open()
    alerting.notify(target(verdicts=True, severity="critical"))
    assert receiver.requests == []
