"""A job over HTTP: lease, rollouts, scores, complete; retries, failures, repeated requests, and leases that expire."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from foreshock.rollouts import encode_rollouts
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.security import Scope
from tests.service import working
from tests.service.keys import make_key
from tests.service.replay.leases.conftest import Clock
from tests.service.sending import Sender, make_batch, problem_of
from tests.service.server import RunningServer


def test_job_is_leased_scored_and_completed(http: httpx.Client, run: Sender) -> None:
    probe = working.ask_for_probe(run, 3, options={"vllm.prefill": {"batch_size": 4}}).raise_for_status().json()
    holder = working.take_lease(http)
    job = holder.lease["job"]
    assert job["probe"] == probe["id"]
    assert job["run"] == run.run
    assert (job["attempt"], job["step"], job["kind"]) == (1, 3, "exact")
    assert job["scorers"] == [{"scorer": "vllm.prefill", "variant": ""}]
    assert job["options"] == {"vllm.prefill": {"batch_size": 4}}
    assert job["checkpoint"]["path"] == "step-3"
    assert job["checkpoint"]["step"] == 3
    assert holder.lease["heartbeat_seconds"] == 20
    assert http.get(f"/v1/probes/{probe['id']}").json()["state"] == "running"

    rollouts = holder.rollouts()
    assert encode_rollouts(rollouts) == encode_rollouts(make_batch(12))
    assert job["rollouts"]["count"] == 12
    assert job["rollouts"]["tokens"] == rollouts.num_tokens
    assert holder.heartbeat().json()["expires_at_us"] >= holder.lease["expires_at_us"]
    assert holder.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 1))).status_code == 201
    assert holder.complete().status_code == 204

    done = http.get(f"/v1/probes/{probe['id']}").json()
    assert done["state"] == "done"
    assert [(each["state"], each["attempts"], each["worker"]) for each in done["jobs"]] == [("done", 1, "w1")]
    assert working.ask_for_lease(http).status_code == 204


def test_repeated_requests_change_nothing(http: httpx.Client, run: Sender) -> None:
    working.ask_for_probe(run, 3)
    holder = working.take_lease(http)
    rollouts = holder.rollouts()
    scores = working.scores_of(rollouts, working.noisy(rollouts, 1))
    assert holder.put_scores(scores).status_code == 201
    assert holder.put_scores(scores).json()["status"] == "duplicate"
    assert holder.complete().status_code == 204
    assert holder.complete().status_code == 204
    assert holder.put_scores(scores).status_code == 200
    other = holder.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 2)))
    assert problem_of(other) == (409, "result-conflict")


def test_requests_at_once_count_once(http: httpx.Client, run: Sender) -> None:
    # On PostgreSQL the later one waits for the row of the job, and then reads the lease as it was before.
    probe = working.ask_for_probe(run, working.STEP).json()["id"]
    holder = working.take_lease(http)
    with ThreadPoolExecutor(8) as pool:
        assert {answer.status_code for answer in pool.map(holder.fail, ["retry"] * 8)} == {204}
        assert http.get(f"/v1/probes/{probe}").json()["jobs"][0]["attempts"] == 1
        holder = working.take_lease(http)
        rollouts = holder.rollouts()
        holder.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 1))).raise_for_status()
        assert {answer.status_code for answer in pool.map(lambda _: holder.complete(), range(8))} == {204}


def test_job_fails_after_three_tries_with_every_reason(http: httpx.Client, run: Sender) -> None:
    probe = working.ask_for_probe(run, 3, ["vllm.prefill", "torch.float32"]).json()["id"]
    for number in range(3):
        answer = working.take_lease(http, f"w{number}", scorers=["vllm.prefill"]).fail(
            "retry", f"out of memory {number}"
        )
        assert answer.status_code == 204
    assert working.ask_for_lease(http, scorers=["vllm.prefill"]).status_code == 204
    jobs = {job["engine"]: job for job in http.get(f"/v1/probes/{probe}").json()["jobs"]}
    assert jobs["vllm"]["state"] == "failed"
    assert jobs["vllm"]["attempts"] == 3
    assert jobs["vllm"]["reasons"] == [f"try {n + 1} on w{n}: out of memory {n}" for n in range(3)]
    assert "given up after 3 tries" in jobs["vllm"]["reason"]
    # The other engine's job goes on.
    assert working.take_lease(http).lease["job"]["scorers"] == [{"scorer": "torch.float32", "variant": ""}]


@pytest.mark.parametrize(("kind", "state"), [("final", "failed"), ("skipped", "skipped")])
def test_final_failure_ends_the_whole_probe(http: httpx.Client, run: Sender, kind: str, state: str) -> None:
    probe = working.ask_for_probe(run, 3, ["vllm.prefill", "torch.trainer"]).json()["id"]
    first, second = working.take_lease(http, "first"), working.take_lease(http, "second")
    reason = "the weights' digest is not the one that was announced"
    assert first.fail(kind, reason).status_code == 204
    assert first.fail(kind, reason).status_code == 204
    read = http.get(f"/v1/probes/{probe}").json()
    assert (read["state"], read["reason"]) == (state, reason) or reason in read["reason"]
    assert {job["state"] for job in read["jobs"]} == {state}
    assert all(reason in job["reason"] for job in read["jobs"])
    assert second.complete().json()["type"] == "urn:foreshock:problem:lease-lost"
    assert working.ask_for_lease(http).status_code == 204


def test_job_is_leased_to_one_worker_only(http: httpx.Client, run: Sender) -> None:
    for step in range(10, 18):
        run.put_shard(step, make_batch(2, seed=step)).raise_for_status()
        working.announce_checkpoint(run, step)
        working.ask_for_probe(run, step).raise_for_status()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: working.ask_for_lease(http, f"w{n}"), range(12)))
    jobs = [answer.json()["job"]["id"] for answer in answers if answer.status_code == 200]
    assert len(jobs) == len(set(jobs))
    # A claim skips a job that another claim has locked, so that a few may get none now; the next claim gets it.
    while (answer := working.ask_for_lease(http, "alone")).status_code == 200:
        jobs.append(answer.json()["job"]["id"])
    assert len(set(jobs)) == len(jobs) == 8


def test_long_poll_for_a_job_ends_when_one_is_queued(http: httpx.Client, run: Sender) -> None:
    began = time.monotonic()
    assert working.ask_for_lease(http, wait=0.7).status_code == 204
    assert 0.6 < time.monotonic() - began < 25
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(working.ask_for_lease, http, wait=30)
        time.sleep(0.3)
        assert not waiting.done()
        began = time.monotonic()
        working.ask_for_probe(run, 3)
        assert waiting.result().status_code == 200
    assert time.monotonic() - began < 25


def test_hundred_waiting_workers_do_not_block_other_requests(server: RunningServer, run: Sender) -> None:
    # The server's threads are 40 and a database pool has 60 connections: waiting must hold neither.
    async def ask() -> tuple[int, int]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as many:
            bodies = [working.lease_request(f"w{n}", wait=30) for n in range(100)]
            waiting = [asyncio.create_task(many.post("/v1/leases", json=body)) for body in bodies]
            await asyncio.sleep(1.0)
            answer = await many.get(f"/v1/runs/{run.run}")
            ended = sum(each.done() for each in waiting)
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return answer.status_code, ended

    assert asyncio.run(ask()) == (200, 0)


def test_reasons_with_any_text_are_kept(http: httpx.Client, run: Sender) -> None:
    probe = working.ask_for_probe(run, 3).json()["id"]
    assert working.take_lease(http).fail("final", "Traceback\n  \x00 λ 💥" + "x" * 5_000).status_code == 204
    reason = http.get(f"/v1/probes/{probe}").json()["reason"]
    assert reason.startswith("Traceback\n  � λ 💥")
    assert len(reason) == 2_000


def test_unknown_lease_is_not_found(http: httpx.Client) -> None:
    answer = http.post("/v1/leases/lease_nothing/heartbeat", json={"token": 1})
    assert problem_of(answer) == (404, "lease-not-found")


LEASE_SECONDS = 60


def test_worker_with_an_expired_lease_is_refused_and_the_next_one_completes_the_job(
    http: httpx.Client, run: Sender, clock: Clock
) -> None:
    probe = working.ask_for_probe(run, 3).json()["id"]
    late = working.take_lease(http, "late")
    rollouts = late.rollouts()
    late.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 1))).raise_for_status()
    clock.pass_seconds(LEASE_SECONDS + 1)
    newer = working.take_lease(http, "newer")
    assert newer.token > late.token
    wrong = working.scores_of(rollouts, working.noisy(rollouts, 7))
    for answer in (late.heartbeat(), late.get_rollouts(), late.put_scores(wrong), late.complete(), late.fail("final")):
        assert problem_of(answer) == (409, "lease-lost")

    newer.put_scores(working.scores_of(rollouts, working.noisy(rollouts, 2))).raise_for_status()
    newer.complete().raise_for_status()
    items = run.get("steps/3/tokens", comparison="vllm.prefill/rollout", worst=1000).json()["items"]
    shown = {(each["sample_id"], each["position"]): each["log_probs"]["vllm.prefill"] for each in items}
    expected = working.noisy(rollouts, 2)
    assert shown[rollouts.sample_ids[0], 0] == pytest.approx(float(expected[0]))
    read = http.get(f"/v1/probes/{probe}").json()
    assert read["jobs"][0]["worker"] == "newer"
    assert read["jobs"][0]["reasons"] == ["try 1 on late: lease expired: no heartbeat for 60 s"]


def test_lease_that_was_granted_before_the_clock_was_set_back_expires(
    http: httpx.Client, run: Sender, clock: Clock
) -> None:
    working.ask_for_probe(run, 3)
    late = working.take_lease(http, "late")
    clock.pass_seconds(-5)
    assert working.ask_for_lease(http, "newer").status_code == 204
    clock.pass_seconds(-3600)
    working.take_lease(http, "newer")
    assert late.heartbeat().status_code == 409


def test_projects_do_not_see_each_others_jobs(http: httpx.Client, database: Database) -> None:
    run = working.run_to_probe(http, working.STEP, project="ours")
    probe = working.ask_for_probe(run, working.STEP).raise_for_status().json()["id"]
    theirs, ours = (make_key(database, Scope.WORKER, Scope.READ, project=name)[1] for name in ("theirs", "ours"))
    assert http.post("/v1/leases", json=working.lease_request(), headers=theirs).status_code == 204
    lease = http.post("/v1/leases", json=working.lease_request(), headers=ours).json()
    assert lease["job"]["probe"] == probe
    assert "foreshock_step" not in http.get("/metrics", headers=theirs).text
    assert "foreshock_step{" in http.get("/metrics", headers=ours).text
    assert len(http.get("/v1/hardware", headers=theirs).json()["workers"]) == 1


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_each_call_needs_its_scope(http: httpx.Client, database: Database) -> None:
    run = working.run_to_probe(http, working.STEP)
    probe = working.ask_for_probe(run, working.STEP).raise_for_status().json()["id"]
    policy = f"/v1/runs/{run.run}/probe-policy"
    calls = (
        ("POST", "/v1/leases", working.lease_request(), Scope.WORKER),
        ("PUT", policy, {"every_steps": 10}, Scope.ADMIN),
        ("GET", policy, None, Scope.READ),
        ("DELETE", f"/v1/probes/{probe}", None, Scope.INGEST),
        ("GET", "/metrics", None, Scope.READ),
    )
    keys = {scope: make_key(database, scope)[1] for scope in Scope}
    assert working.ask_for_lease(http).status_code == 401
    for method, path, body, needed in calls:
        for other in set(Scope) - {needed, Scope.ADMIN}:
            assert http.request(method, path, json=body, headers=keys[other]).status_code == 403, (method, path, other)
        assert http.request(method, path, json=body, headers=keys[needed]).is_success, (method, path)
