"""Attempts, and the rule that selects the active attempt of a step."""

import uuid
from functools import partial

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock_service.platform.context import EventBus
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs.attempts import (
    NO_BOUND,
    AttemptCreate,
    AttemptStart,
    active_attempt_of,
    active_ranges,
    attempts_of_run,
    get_or_create_attempt,
)
from foreshock_service.runs.events import AttemptStarted
from foreshock_service.runs.runs import RunCreate, get_or_create_run
from tests.service.sending import Sender, make_batch, start_run

STEPS = range(10)


def attempts_from(resume_steps: list[int]) -> list[AttemptStart]:
    """Return attempts 1, 2, … that resume at these steps."""
    return [AttemptStart(number, step) for number, step in enumerate(resume_steps, start=1)]


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 40))
def test_step_is_active_in_newest_attempt_that_began_at_or_before_it(resume_steps: list[int], step: int) -> None:
    attempts = attempts_from(resume_steps)
    eligible = [attempt.attempt for attempt in attempts if attempt.resume_step <= step]
    assert active_attempt_of(attempts, step) == (max(eligible) if eligible else None)


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 40), st.just(NO_BOUND) | st.integers(0, 40))
def test_bounded_ranges_hold_the_active_steps_within(resume_steps: list[int], first: int, last: int) -> None:
    attempts = attempts_from(resume_steps)
    bounded = active_ranges(attempts, first, last)
    for step in range(50):
        inside = first <= step <= last
        holding = [each.attempt for each in bounded if each.first <= step < each.end]
        assert holding == ([active] if inside and (active := active_attempt_of(attempts, step)) is not None else [])


def test_same_key_returns_same_attempt_and_new_keys_count_up(sender: Sender, http: httpx.Client) -> None:
    path = f"/v1/runs/{sender.run}/attempts"
    second = http.post(path, json={"key": "second", "resume_step": 10, "fingerprint": {"cards": ["H100"]}})
    assert (second.status_code, second.json()["attempt"]) == (201, 2)
    again = http.post(path, json={"key": "second", "resume_step": 10})
    assert (again.status_code, again.json()["attempt"]) == (200, 2)
    conflict = http.post(path, json={"key": "second", "resume_step": 11})
    assert conflict.status_code == 409
    assert [each["attempt"] for each in http.get(path).json()["items"]] == [1, 2]


def test_resume_supersedes_later_steps_and_deletes_nothing(http: httpx.Client) -> None:
    first = start_run(http)
    for step in range(4):
        first.put_shard(step, make_batch(seed=step)).raise_for_status()
        first.put_scalars(step, {"loss": float(step)}).raise_for_status()
    second = first.new_attempt("resumed", 2)
    second.put_shard(2, make_batch(seed=20)).raise_for_status()
    second.put_scalars(2, {"loss": 20.0}).raise_for_status()

    active = [(0, 1), (1, 1), (2, 2)]
    assert [(each["step"], each["attempt"]) for each in first.get("steps").json()["items"]] == active
    columns = first.get("measurements", comparison="rollout", measure="num_rollouts").json()["columns"]
    assert list(zip(columns["step"], columns["attempt"], strict=True)) == active
    assert first.get("scalars").json()["columns"]["value"] == [0.0, 1.0, 20.0]
    older = first.get("measurements", comparison="rollout", measure="num_rollouts", attempt=1).json()["columns"]
    assert older["step"] == [0, 1, 2, 3]
    assert first.get("steps/3/buckets").status_code == 404
    assert first.get("steps/3/buckets", attempt=1).status_code == 200
    assert first.get("steps", attempt=3).status_code == 404


def test_last_step_of_a_run_is_that_of_its_active_steps(http: httpx.Client) -> None:
    first = start_run(http)

    assert first.about()["last_step"] is None
    first.put_steps(range(4))
    assert first.about()["last_step"] == 3
    second = first.new_attempt("resumed", 2)
    assert first.about()["last_step"] == 1
    first.put_shard(5, make_batch(seed=5)).raise_for_status()
    assert first.about()["last_step"] == 1
    second.put_shard(2, make_batch(seed=20)).raise_for_status()
    assert first.about()["last_step"] == 2
    late_attempt(first, 1, 3600.0)
    assert first.about()["last_step"] == 2
    first.new_attempt("from the start", 0)
    assert first.about()["last_step"] is None


def late_attempt(first: Sender, resume_step: int, age_seconds: float) -> Sender:
    """Register an attempt of a launch that began so long ago."""
    body = {"key": f"of {age_seconds} s ago", "resume_step": resume_step, "age_seconds": age_seconds}
    answer = first.http.post(f"/v1/runs/{first.run}/attempts", json={**body, "heartbeats": True}).raise_for_status()
    return Sender(first.http, first.run, answer.json()["attempt"])


def active_launches(resume_steps: list[int], registered: list[int]) -> list[int | None]:
    """Return by step the newest of the registered launches that hold it."""
    return [max((each for each in registered if resume_steps[each] <= step), default=None) for step in STEPS]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.data())
def test_order_of_registration_does_not_count(database: Database, resume_steps: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(resume_steps))))
    published: list[AttemptStarted] = []
    events = EventBus()
    events.subscribe(AttemptStarted, lambda _, event: published.append(event))
    run = RunCreate(key=uuid.uuid4().hex)
    run_id = database.write(lambda session: get_or_create_run(session, events, UNRESTRICTED, run)[0].id)

    def register(session: Session, body: AttemptCreate) -> tuple[int, bool]:
        attempt, created = get_or_create_attempt(session, events, UNRESTRICTED, run_id, body)
        return attempt.attempt, created

    for place, launch in enumerate(order):
        # Launch 0 began first.
        age = 60.0 * (len(order) - launch)
        body = AttemptCreate(key=f"{launch}", resume_step=resume_steps[launch], age_seconds=age)
        published.clear()
        attempt, created = database.write(partial(register, body=body))
        assert (attempt, created) == (place + 1, True)
        expected = active_launches(resume_steps, order[: place + 1])
        with database.read() as session:
            starts = attempts_of_run(session, run_id)
        active = [active_attempt_of(starts, step) for step in STEPS]
        assert [None if each is None else order[each - 1] for each in active] == expected
        if place and launch in expected:
            newest = launch == max(order[: place + 1])
            assert published == [AttemptStarted(run_id, attempt, resume_steps[launch], newest)]
        else:
            assert published == []


@pytest.mark.parametrize("jump_us", [-(10**12), 10**15])
def test_start_without_an_age_is_newest_after_a_jump(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, jump_us: int
) -> None:
    sender.new_attempt("second", 2)
    monkeypatch.setattr("foreshock_service.runs.attempts.now_us", lambda: now_us() + jump_us)
    third = sender.new_attempt("third", 1)
    for step in range(3):
        third.put_scalars(step, {"loss": 3.0}).raise_for_status()
        sender.put_scalars(step, {"loss": 1.0}).raise_for_status()
    assert sender.get("scalars").json()["columns"]["value"] == [1.0, 3.0, 3.0]


def test_launch_that_arrives_late_takes_nothing_from_the_next(http: httpx.Client) -> None:
    run = http.post("/v1/runs", json={"key": "a-run"}).raise_for_status().json()["id"]
    newest = late_attempt(Sender(http, run, 0), 0, 0.0)
    for step in range(4):
        newest.put_shard(step, make_batch(seed=step)).raise_for_status()
        newest.put_scalars(step, {"reward": 2.0}).raise_for_status()
    decision = {"kind": "halve", "reason": "a test"}
    http.post(f"/v1/runs/{run}/advice/decisions", json=decision).raise_for_status()
    log = newest.get("lr-advice/decisions").json()
    assert [each["kind"] for each in log["items"]] == ["halve"]
    http.patch(f"/v1/runs/{run}", json={"state": "finished"}).raise_for_status()
    older = late_attempt(newest, 0, 3600.0)
    assert older.attempt == 2
    for step in range(6):
        older.put_shard(step, make_batch(seed=10 + step)).raise_for_status()
        older.put_scalars(step, {"reward": 1.0}).raise_for_status()
    active = [(each["step"], each["attempt"]) for each in newest.get("steps").json()["items"]]
    assert active == [(step, 1) for step in range(4)]
    assert newest.get("scalars").json()["columns"]["value"] == [2.0] * 4
    assert newest.get("lr-advice/decisions").json() == log
    assert http.get(f"/v1/runs/{run}").json()["state"] == "finished"


def test_end_of_an_earlier_launch_does_not_end_the_next(http: httpx.Client) -> None:
    first = start_run(http)
    second = first.new_attempt("second", 2)

    def state_after(state: str, attempt: int | None) -> object:
        body = {"state": state, "attempt": attempt, "name": f"{state} by {attempt}"}
        changed = http.patch(f"/v1/runs/{first.run}", json=body).raise_for_status().json()
        assert changed["name"] == body["name"]
        return changed["state"]

    assert state_after("failed", first.attempt) == "running"
    assert state_after("finished", late_attempt(first, 0, 3600.0).attempt) == "running"
    assert state_after("finished", second.attempt) == "finished"
    assert state_after("failed", first.attempt) == "finished"
    assert state_after("running", None) == "running"
