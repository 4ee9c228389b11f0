"""What changes a probe that exists: its priority, an alert near its step, and DELETE, which cancels it."""

import httpx
import pytest

from foreshock_service.platform.database.engine import database_now_us
from foreshock_service.platform.database.session import Database
from foreshock_service.replay.probes import workers as service
from foreshock_service.replay.probes.jobs import HEAD_START_US
from foreshock_service.replay.probes.service import ALERT_WINDOW_STEPS
from tests.service.sending import Sender, problem_of
from tests.service.stored import add_alert
from tests.service.working import ask_for_lease, ask_for_probe, noisy, run_to_probe, scores_of, take_lease


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with four closed steps and their checkpoints."""
    return run_to_probe(http, 1, 2, 3, 40, rollouts=3)


def leased_steps(http: httpx.Client) -> list[int]:
    """Lease every queued job and return their steps in that order."""
    steps = []
    while (answer := ask_for_lease(http)).status_code == 200:
        steps.append(answer.json()["job"]["step"])
    return steps


def test_jobs_are_leased_by_priority_and_then_by_age(http: httpx.Client, run: Sender) -> None:
    for step, priority in ((1, None), (2, "normal"), (3, "urgent"), (40, "urgent")):
        asked = {} if priority is None else {"priority": priority}
        probe = ask_for_probe(run, step, **asked).raise_for_status().json()
        assert probe["priority"] == priority
        assert [job["priority"] for job in probe["jobs"]] == [priority or "normal"]
    assert leased_steps(http) == [3, 40, 1, 2]


def test_step_near_an_open_alert_is_urgent_unless_it_is_requested(
    http: httpx.Client, run: Sender, database: Database
) -> None:
    add_alert(database, run.run, 40 - ALERT_WINDOW_STEPS)
    add_alert(database, run.run, 3, "resolved")
    assert ask_for_probe(run, 3).json()["jobs"][0]["priority"] == "normal"
    near = ask_for_probe(run, 40).json()
    assert (near["priority"], near["jobs"][0]["priority"]) == (None, "urgent")
    assert ask_for_probe(run, 40, ["torch.float32"], priority="normal").json()["jobs"][0]["priority"] == "normal"
    assert leased_steps(http) == [40, 3, 40]


def test_an_equal_request_finds_the_probe_as_it_is(http: httpx.Client, run: Sender) -> None:
    first = ask_for_probe(run, 1).json()
    again = ask_for_probe(run, 1, priority="urgent")
    assert (again.status_code, again.json()) == (200, first)


def test_a_retried_probe_keeps_its_priority(http: httpx.Client, run: Sender) -> None:
    probe = ask_for_probe(run, 1, priority="urgent").json()["id"]
    take_lease(http).fail("final").raise_for_status()
    ask_for_probe(run, 2)
    http.post(f"/v1/probes/{probe}/retry").raise_for_status()
    assert leased_steps(http) == [1, 2]


def test_job_is_leased_before_urgent_ones_a_day_later(
    http: httpx.Client, run: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_for_probe(run, 1)
    ask_for_probe(run, 2, priority="urgent")
    with monkeypatch.context() as later:
        later.setattr(
            "foreshock_service.replay.probes.service.database_now_us", lambda s: database_now_us(s) + HEAD_START_US
        )
        ask_for_probe(run, 3, priority="urgent")
    assert leased_steps(http) == [2, 1, 3]


def test_cancelled_probe_is_leased_by_no_worker_and_can_be_retried(http: httpx.Client, run: Sender) -> None:
    probe = ask_for_probe(run, 3).json()["id"]
    cancelled = http.delete(f"/v1/probes/{probe}")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "skipped")
    assert cancelled.json()["reason"] == "the probe was cancelled"
    assert ask_for_lease(http).status_code == 204
    assert http.delete(f"/v1/probes/{probe}").json() == cancelled.json()
    assert ask_for_probe(run, 3).json()["id"] == probe
    assert http.post(f"/v1/probes/{probe}/retry").json()["state"] == "queued"
    assert take_lease(http).lease["job"]["probe"] == probe


def test_worker_of_a_cancelled_job_is_refused_and_its_scores_do_not_count(http: httpx.Client, run: Sender) -> None:
    probe = ask_for_probe(run, 3, ["vllm.prefill", "torch.float32"]).json()["id"]
    holder = take_lease(http, scorers=["vllm.prefill"])
    rollouts = holder.rollouts()
    holder.put_scores(scores_of(rollouts, noisy(rollouts, 1))).raise_for_status()
    assert {job["state"] for job in http.delete(f"/v1/probes/{probe}").json()["jobs"]} == {"skipped"}
    for answer in (holder.heartbeat(), holder.complete(), holder.fail("retry")):
        assert problem_of(answer) == (409, "lease-lost")
    assert run.get("steps/3/attribution").status_code == 404


def test_scores_of_a_done_job_stay(http: httpx.Client, run: Sender) -> None:
    probe = ask_for_probe(run, 3, ["vllm.prefill", "torch.float32"]).json()["id"]
    holder = take_lease(http, scorers=["vllm.prefill"])
    rollouts = holder.rollouts()
    holder.put_scores(scores_of(rollouts, noisy(rollouts, 1))).raise_for_status()
    holder.complete().raise_for_status()
    jobs = http.delete(f"/v1/probes/{probe}").json()["jobs"]
    assert {job["engine"]: job["state"] for job in jobs} == {"vllm": "done", "torch": "skipped"}
    items = run.get("steps/3/tokens", comparison="vllm.prefill/rollout", worst=5).json()["items"]
    assert "vllm.prefill" in items[0]["log_probs"]


def test_ended_and_unknown_probes_are_refused(http: httpx.Client, run: Sender) -> None:
    probe = ask_for_probe(run, 3).json()["id"]
    take_lease(http).fail("final", "no such folder").raise_for_status()
    ended = http.delete(f"/v1/probes/{probe}")
    assert problem_of(ended) == (409, "probe-has-ended")
    assert "ended as failed" in ended.json()["detail"]
    assert http.delete("/v1/probes/probe_none").status_code == 404


def test_hardware_lists_the_worker_seen_last_first(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("w1", "w2", "w3"):
        ask_for_lease(http, name, scorers=["vllm.prefill"]).raise_for_status()
    monkeypatch.setattr(service, "_MOST_WORKERS", 2)
    read = http.get("/v1/hardware").json()
    assert [(each["name"], each["accelerator"], each["device_name"]) for each in read["workers"]] == [
        ("w3", "cpu", "a CPU"),
        ("w2", "cpu", "a CPU"),
    ]
