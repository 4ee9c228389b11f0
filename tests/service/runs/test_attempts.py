"""Attempts, and the rule that selects the active attempt of a step."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock_service.runs.attempts import AttemptStart, active_attempt_of, active_ranges
from tests.service.sending import make_batch, start_run


def attempts_from(resume_steps: list[int]) -> list[AttemptStart]:
    """Return attempts 1, 2, … that resume at these steps."""
    return [AttemptStart(number, step) for number, step in enumerate(resume_steps, start=1)]


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 40))
def test_step_is_active_in_newest_attempt_that_began_at_or_before_it(resume_steps: list[int], step: int) -> None:
    attempts = attempts_from(resume_steps)
    eligible = [attempt.attempt for attempt in attempts if attempt.resume_step <= step]
    assert active_attempt_of(attempts, step) == (max(eligible) if eligible else None)
    holding = [each for each in active_ranges(attempts) if each.first <= step and (each.end or step + 1) > step]
    assert [each.attempt for each in holding] == eligible[-1:]


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 40), st.none() | st.integers(0, 40))
def test_bounded_ranges_hold_the_active_steps_within_the_bounds(
    resume_steps: list[int], first: int, last: int | None
) -> None:
    attempts = attempts_from(resume_steps)
    bounded = active_ranges(attempts, first, last)
    for step in range(50):
        inside = first <= step and (last is None or step <= last)
        holding = [each.attempt for each in bounded if each.first <= step and (each.end is None or step < each.end)]
        assert holding == ([active] if inside and (active := active_attempt_of(attempts, step)) is not None else [])


def test_same_key_returns_same_attempt_and_new_keys_count_up(http: httpx.Client) -> None:
    sender = start_run(http)
    path = f"/v1/runs/{sender.run}/attempts"
    second = http.post(path, json={"key": "second", "resume_step": 10, "fingerprint": {"cards": ["H100"]}})
    assert (second.status_code, second.json()["attempt"]) == (201, 2)
    again = http.post(path, json={"key": "second", "resume_step": 10})
    assert (again.status_code, again.json()["attempt"]) == (200, 2)
    conflict = http.post(path, json={"key": "second", "resume_step": 11})
    assert conflict.status_code == 409
    assert [each["attempt"] for each in http.get(path).json()["items"]] == [1, 2]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "fingerprint", [{"a": "\x00"}, {"a": 2**70}, "text", {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}]
)
def test_invalid_fingerprint_is_refused(http: httpx.Client, fingerprint: object) -> None:
    run = http.post("/v1/runs", json={"key": "k"}).json()["id"]
    answer = http.post(f"/v1/runs/{run}/attempts", json={"key": "a", "fingerprint": fingerprint})
    assert answer.status_code == 422


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
