"""DELETE of a probe: queued jobs end, a worker that has begun is refused, ended probes are a conflict."""

from __future__ import annotations

import httpx

from tests.service.sending import Sender
from tests.service.working import ask_for_lease, ask_for_probe, noisy, scores_of, take_lease


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
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:foreshock:problem:lease-lost")
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
    assert (ended.status_code, ended.json()["type"]) == (409, "urn:foreshock:problem:probe-has-ended")
    assert "ended as failed" in ended.json()["detail"]
    assert http.delete("/v1/probes/probe_none").status_code == 404
