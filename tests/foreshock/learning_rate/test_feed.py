"""Tests of the feed: `scale` never waits, whatever the service answers and in any order."""

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.client import Client
from foreshock.learning_rate import Advice, AdviceFeed, feed
from foreshock.learning_rate.levers import Correction, Rollback
from tests.foreshock.client.faulty_service import FaultyService, faulty_service
from tests.foreshock.learning_rate.test_advice import ANSWER, SURGE_POINT
from tests.ports import free_port
from tests.waiting import wait_until


def advice(revision: int = 1, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    return {**ANSWER, "attempt": attempt, "revision": revision, **changes}


_DOWN = f"http://127.0.0.1:{free_port()}"


@contextmanager
def following(url: str, *, starts: bool = True, **options: Any) -> Iterator[AdviceFeed]:
    """Yield the feed of a client whose run has the id "run-1" once it has started."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        client = Client(url, run_key="1", spool_directory=folder, exit_seconds=0.5, heartbeat_seconds=1e6)
        ended.callback(client.close)
        if starts:
            client.start_run()
        yield ended.enter_context(AdviceFeed(client, **options))


@pytest.fixture
def service() -> Iterator[FaultyService]:
    with faulty_service() as running:
        yield running


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(feed, "_LONGEST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(feed, "_MIN_SECONDS_BETWEEN_POLLS", 0.02)
    monkeypatch.setattr(feed, "_MAX_CLOSE_SECONDS", 15.0)


def test_scale_is_one_before_the_first_answer() -> None:
    with following(f"http://127.0.0.1:{free_port()}") as fed:
        started = time.perf_counter()
        assert [fed.scale(step) for step in range(1000)] == [1.0] * 1000
        assert time.perf_counter() - started < 30
        assert (fed.mode, fed.revision, fed.alerts, fed.want_weights_at_step) == ("shadow", 0, (), None)
        assert fed.state_dict()["advice"] is None
        fed.load_state_dict({"advice": None})
        assert fed.scale(1) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, [1 / 3, 2 / 3, 1.0, 1.0]),
        (advice(points=[{"step": 2, "loop": 0.3, "loop_step": 2}]), [1 / 3, 0.2, 0.3, 0.3]),
        (advice(points=[{"step": 0, "loop": 0.12, "loop_step": 0}]), [0.1, 0.1, 0.12, 0.12]),
        (advice(mode="shadow"), [1.0] * 4),
    ],
)
def test_trainer_in_apply_mode_warms_up(answer: dict[str, Any] | None, expected: list[float], tmp_path: Path) -> None:
    with Client(_DOWN, run_key="warms", spool_directory=tmp_path) as client:
        client.start_run(advice_mode="apply")
        with AdviceFeed(client) as fed:
            assert answer is None or fed._take(Advice.from_json(answer))
            assert [fed.scale(step) for step in range(1, 5)] == pytest.approx(expected)


def test_newest_answer_is_followed(service: FaultyService) -> None:
    service.set_advice(advice(1, points=[]))
    with following(service.url) as fed:
        wait_until(lambda: fed.revision == 1)
        assert fed.scale(400) == 1.0
        service.set_advice(advice(2))
        wait_until(lambda: fed.revision == 2)
        assert fed.scale(400) == 0.25
        assert (fed.mode, fed.want_weights_at_step) == ("apply", 210)
        assert [alert.rule for alert in fed.alerts] == ["length_surge"]
        service.set_advice(advice(3, mode="shadow"))
        wait_until(lambda: fed.revision == 3)
        assert (fed.scale(400), fed.advised_scale(400)) == (1.0, 0.25)


def test_long_polls_send_step_and_etag(service: FaultyService) -> None:
    service.set_advice(advice(1))
    with following(service.url, wait_seconds=0.3) as fed:
        wait_until(lambda: fed.revision == 1)
        fed.scale(17)
        wait_until(lambda: service.requests >= 5 and bool(service.bodies("/follow")))
        fed.scale(17)
        wait_until(lambda: [item.query.get("step") for item in service.received].count("17") >= 2)
    followed, polls = service.bodies("/follow"), [item for item in service.received if item.method == "GET"]
    assert [json.loads(body)["step"] for body in followed] == [17]
    assert polls[0].path == "/v1/runs/run-1/advice"
    assert (polls[0].query.get("wait"), "If-None-Match" in polls[0].headers) == ("0", False)
    assert (polls[-1].query["wait"], polls[-1].query["step"]) == ("0.3", "17")
    assert polls[-1].headers["If-None-Match"] == '"1"'


def test_schedule_continues_while_the_service_is_away(service: FaultyService) -> None:
    service.set_advice(advice(1))
    with following(service.url) as fed:
        wait_until(lambda: fed.revision == 1)
        service.stop()
        assert [fed.scale(step) for step in (197, 198, 396, 594, 792)] == [1.0, 0.5, 0.25, 0.125, 0.1]
        service.set_advice(advice(2, points=[{**SURGE_POINT, "halvings": 1}]))
        service.start()
        wait_until(lambda: fed.revision == 2)
        assert fed.scale(197) == 0.5


def test_invalid_answer_is_ignored(service: FaultyService) -> None:
    service.set_advice({**ANSWER, "revision": 5, "schedule": {"surge_step": "soon"}, "mode": "apply"})
    with following(service.url) as fed:
        wait_until(lambda: service.requests >= 2)
        assert fed.scale(400) == 1.0
        service.set_advice(advice(6))
        wait_until(lambda: fed.revision == 6)


def test_late_and_repeated_answers_change_nothing() -> None:
    with following(_DOWN, starts=False) as fed:

        @settings(max_examples=50, deadline=None)
        @given(revisions=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 9), st.integers(0, 9)), min_size=1))
        def repeated(revisions: list[tuple[int, int, int]]) -> None:
            fed._advice, newest = feed._NONE, None
            for attempt, revision, observed in revisions:
                answer = Advice.from_json(advice(revision, attempt, observed_step=observed))
                fed.load_state_dict({"advice": answer.to_json()})
                newest = answer if newest is None or answer.order >= newest.order else newest
                assert fed.advice == newest
                assert fed.revision == newest.revision

        repeated()


@pytest.mark.parametrize("fault", [500, 404, 410, "reset", "half", "html"])
def test_feed_recovers_from_service_faults(service: FaultyService, fault: Any) -> None:
    service.set_advice(advice(1))
    faults = [fault] * 3
    service.always = lambda received: faults.pop() if received.path.endswith("/advice") and faults else None
    with following(service.url) as fed:
        assert fed.scale(400) == 1.0
        wait_until(lambda: fed.scale(400) == 0.25)
    assert not faults


def known(fed: AdviceFeed) -> tuple[str, int, float]:
    return fed.mode, fed.revision, fed.scale(400)


def test_advice_of_a_checkpoint_is_not_carried_into_another_run(service: FaultyService, tmp_path: Any) -> None:
    service.set_advice(advice(57, attempt=1, run="run-a"))
    with Client(service.url, run_key="a", spool_directory=tmp_path) as first, AdviceFeed(first) as fed:
        first.start_run()
        wait_until(lambda: fed.revision == 57)
        state = json.loads(json.dumps(fed.state_dict()))
    for key, expected in (("b", ("shadow", 0, 1.0)), ("a", ("apply", 57, 0.25))):
        # Nothing is registered yet: the key is all that is known of the run.
        client = Client(_DOWN, run_key=key, spool_directory=tmp_path / key)
        with AdviceFeed(client) as fed:
            fed.load_state_dict(state)
            assert known(fed) == expected
        client.close(0.1)


def test_advice_of_another_run_and_of_a_replaced_database_is_dropped(
    service: FaultyService, caplog: pytest.LogCaptureFixture
) -> None:
    service.set_advice(advice(57))
    with following(service.url, wait_seconds=0.2) as fed:
        wait_until(lambda: fed.revision == 57)
        saved = {"advice": Advice.from_json(advice(99, run="run-2")).to_json()}
        fed.load_state_dict(saved)
        assert known(fed) == ("apply", 57, 0.25)
        assert "advice of the run run-2 is dropped" in caplog.text
        # Registered anew, the run has another id.
        client = fed._client
        assert isinstance(client, Client)
        client._background.sender._runs[("default", "1")] = "run-2"
        service.set_advice(advice(1, run="run-2", mode="shadow", points=[]))
        wait_until(lambda: known(fed) == ("shadow", 1, 1.0))
    assert "the service's database was replaced" in caplog.text


def test_answers_for_other_attempts_are_ignored(service: FaultyService, caplog: pytest.LogCaptureFixture) -> None:
    with following(service.url) as fed:
        fed._client.start_run(resume_step=1)
        wait_until(lambda: fed._client.attempt == 2)
        service.set_advice(advice(1, attempt=1))
        before = service.requests
        wait_until(lambda: service.requests >= before + 2)
        assert fed.advice is None
        service.set_advice(advice(2, attempt=2))
        wait_until(lambda: fed.revision == 2)
        service.set_advice(advice(3, attempt=3))
        wait_until(lambda: "taken over" in caplog.text)
        assert (fed.revision, fed.scale(400)) == (2, 0.25)


def test_feed_of_a_client_waits_for_registration_and_asks_for_weights(service: FaultyService, tmp_path: Any) -> None:
    service.set_advice(advice(1, run="run-k"))
    client = Client(service.url, run_key="k", spool_directory=tmp_path)
    with AdviceFeed(client) as fed:
        assert fed.scale(400) == 1.0
        client.start_run()
        wait_until(lambda: fed.revision == 1)
        assert fed.scale(400) == 0.25
        wait_until(lambda: client.want_weights_at_step == 210)
        fed.acknowledge(400, 2.5e-7)
        assert client.flush(60)
    client.close()
    (acknowledged,) = [item for item in service.received if item.path.endswith("/ack")]
    assert acknowledged.path == "/v1/runs/run-k/lr-advice/ack"
    assert acknowledged.json() == {"revision": 1, "step": 400, "applied_lr": 2.5e-7, "attempt": 1}


def test_restart_in_one_process_reports_its_own_steps(service: FaultyService, tmp_path: Path) -> None:
    client = Client(service.url, run_key="k", spool_directory=tmp_path)
    with AdviceFeed(client, wait_seconds=0.1) as fed:
        for attempt, first in ((1, 100), (2, 5)):
            client.start_run(resume_step=first, shard=0, shards=1)
            client.flush(60)
            fed.scale(first)
            expected = {"step": first, "attempt": attempt}
            wait_until(lambda: expected in [json.loads(body) for body in service.bodies("/follow")])  # noqa: B023
    client.close()


def test_key_that_may_only_read_gets_advice(service: FaultyService) -> None:
    service.set_advice(advice(1))
    service.always = lambda received: 403 if received.path.endswith("/follow") else None
    with following(service.url, wait_seconds=0.3) as fed:
        wait_until(lambda: fed.revision == 1)
        fed.scale(17)
        wait_until(lambda: any(item.query.get("step") == "17" for item in service.received))
        assert fed.scale(400) == 0.25


def followed(service: FaultyService) -> list[tuple[int, int | None]]:
    """Return the steps that were reported as done, each with its attempt."""
    bodies = [json.loads(body) for body in service.bodies("/follow")]
    return [(body["step"], body["attempt"]) for body in bodies]


def test_step_far_ahead_of_the_logged_ones_is_not_reported_as_done(service: FaultyService) -> None:
    service.set_advice(advice(1, observed_step=-1))
    with following(service.url, wait_seconds=0.1) as fed:
        wait_until(lambda: fed.revision == 1)
        fed.acknowledge(30, 1e-6)
        assert fed.scale(31) == 1.0
        assert [fed.scale(10_000), fed.advised_scale(10_000)] == [0.1, 0.1]
        wait_until(lambda: len([item for item in service.received if item.query.get("step")]) >= 2)
        assert followed(service) == [(31, 1)]
        fed._client.log_scalars(40, {"grad_norm": 0.3})
        fed.scale(41)
        wait_until(lambda: followed(service)[-1] == (41, 1))


def test_step_that_does_not_count_is_reported_again(service: FaultyService) -> None:
    service.set_advice(advice(1))
    service.not_counted = 0
    with following(service.url, wait_seconds=0.1) as fed:
        fed.scale(2)
        wait_until(lambda: len(followed(service)) >= 2)
        service.not_counted = None
        wait_until(lambda: followed(service)[-1] == (2, 1))
        del service.received[:]
        wait_until(lambda: len([item for item in service.received if item.method == "GET"]) >= 3)
        assert followed(service) in ([], [(2, 1)])


def test_step_is_reported_when_its_attempt_has_begun(service: FaultyService, tmp_path: Any) -> None:
    service.set_advice(advice(1, run="run-k"))
    service.always = lambda received: 503 if received.path.endswith("/attempts") else None
    client = Client(service.url, run_key="k", spool_directory=tmp_path)
    with AdviceFeed(client, wait_seconds=0.1) as fed:
        client.start_run()
        fed.acknowledge(1, 1e-6)
        fed.scale(1)
        wait_until(lambda: fed.revision == 1 and service.requests >= 5)
        assert followed(service) == []
        service.always = None
        wait_until(lambda: followed(service) == [(1, 1)] and len(service.bodies("/ack")) == 1)
    client.close()


def test_step_past_the_requested_one_is_polled_once(service: FaultyService) -> None:
    service.set_advice(advice(1, want_weights_at_step=10))
    with following(service.url, wait_seconds=0.5) as fed:
        wait_until(lambda: fed.want_weights_at_step == 10)
        fed.scale(12)

        def asked() -> list[str]:
            return [item.query["wait"] for item in service.received if item.query.get("step") == "12"]

        # One immediate poll, then long polls again.
        wait_until(lambda: len(asked()) >= 4)
        assert asked().count("0") == 1


def test_close_interrupts_a_poll_that_is_not_sent_yet(service: FaultyService, monkeypatch: pytest.MonkeyPatch) -> None:
    service.set_advice(advice(1))
    with contextlib.ExitStack() as ended:
        close_late(service, ended.enter_context(following(service.url)), monkeypatch)


def close_late(service: FaultyService, fed: AdviceFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: fed.revision == 1)
    request, interrupt = fed._connection.request, fed._connection.interrupt
    on_its_way, interrupted = threading.Event(), threading.Event()

    def late_request(*arguments: Any, **keywords: Any) -> Any:
        on_its_way.set()
        interrupted.wait()
        return request(*arguments, **keywords)

    def early_interrupt() -> None:
        interrupt()
        interrupted.set()

    monkeypatch.setattr(fed._connection, "request", late_request)
    monkeypatch.setattr(fed._connection, "interrupt", early_interrupt)
    service.set_advice(advice(2))
    assert on_its_way.wait(60)
    fed.close()
    assert not fed._poller.is_alive()


TIS = {"kind": "token_tis", "threshold": "2"}
BACK: dict[str, Any] = {"step": 41, "root": "runs", "path": "checkpoint-40", "command": "resume"}


def of_levers(revision: int, mode: str = "apply", **points: Any) -> dict[str, Any]:
    """Return an answer of `GET …/advice` with these points of the levers."""
    levers = {name: {"mode": mode, "points": points.get(name, [])} for name in ("correction", "rollback")}
    rate = advice(revision)
    return {**{name: rate[name] for name in ("run", "attempt", "revision")}, "rate": rate, **levers}


def test_correction_and_rollback_of_a_step_are_none_in_shadow_mode(service: FaultyService) -> None:
    points: dict[str, Any] = {"correction": [{"step": 20, "value": TIS}], "rollback": [{"step": 30, "value": BACK}]}
    service.set_advice(of_levers(3, **points))
    with following("http://127.0.0.1:1") as fed:
        assert (fed.correction(25), fed.rollback(35)) == (None, None)
    with following(service.url) as fed:
        wait_until(lambda: fed.revision == 3)
        assert (fed.correction(19), fed.correction(20)) == (None, Correction("token_tis", "2"))
        assert (fed.rollback(29), fed.rollback(30)) == (None, Rollback(**BACK))
        service.set_advice(of_levers(4, "shadow", **points))
        wait_until(lambda: fed.revision == 4)
        assert (fed.correction(25), fed.rollback(35), fed.scale(400)) == (None, None, 0.25)
    assert not service.bodies("/advice/ack"), "without a callback a rollback is only told"


def test_last_decisions_stay_while_the_service_is_away_and_in_a_resumed_trainer(service: FaultyService) -> None:
    service.set_advice(of_levers(3, correction=[{"step": 20, "value": TIS}]))
    with following(service.url) as fed:
        wait_until(lambda: fed.revision == 3)
        service.stop()
        scales = [fed.scale(step) for step in range(25, 125)]
        assert scales == sorted(scales, reverse=True)
        assert {fed.correction(step) for step in range(25, 125)} == {Correction("token_tis", "2")}
        assert fed.rollback(124) is None
    with following(_DOWN) as resumed:
        resumed.load_state_dict(json.loads(json.dumps(fed.state_dict())))
        assert (resumed.revision, resumed.scale(400), resumed.correction(25)) == (3, 0.25, Correction("token_tis", "2"))


@pytest.mark.parametrize(
    ("outcome", "refused"),
    [(None, None), (False, "the trainer's callback refuses it"), (OSError("gone"), "OSError: gone")],
)
def test_callback_is_called_once_and_reported(service: FaultyService, outcome: Any, refused: str | None) -> None:
    called = []

    def go_back(found: Rollback) -> Any:
        called.append(found.step)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    service.set_advice(of_levers(3, rollback=[{"step": 30, "value": BACK}]))
    with following(service.url) as fed:
        fed.on_rollback(go_back)
        wait_until(lambda: fed.revision == 3)
        for step in range(28, 40):
            fed.rollback(step)
        assert called == [41]
        # Another episode.
        points = [{"step": 30, "value": BACK}, {"step": 50, "value": None}, {"step": 60, "value": BACK}]
        service.set_advice(of_levers(5, rollback=points))
        wait_until(lambda: fed.revision == 5)
        for step in range(50, 70):
            fed.rollback(step)
        assert called == [41, 41]
    reports = [item.json() for item in service.received if item.path.endswith("/advice/ack")]
    expected = {"revision": 3, "step": 30, "attempt": 1, "lever": "rollback", "done": None if refused else BACK}
    assert reports[0] == expected | ({} if refused is None else {"refused": refused})


def test_report_of_a_lever_is_sent_when_it_changes(service: FaultyService) -> None:
    with following(service.url) as fed:
        for step in range(5):
            fed.report("correction", step, Correction("token_tis", "2"))
        fed.report("correction", 5, None, "not in\nthis release")
    reports = [item.json() for item in service.received if item.path.endswith("/advice/ack")]
    assert [(each["step"], each["done"], each.get("refused")) for each in reports] == [
        (0, TIS, None),
        (5, None, "not in this release"),
    ]
