"""Senders: threads that repeat each request of a plan until the service acknowledges it, and note every answer.

They treat answers as `foreshock.Client` does. A request is sent again without an answer, after a 5xx, 408, 425 or 429,
and after a 404 of a run whose registration has not been answered. Any other refusal of a valid request is a defect and
is recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from benchmarks.faults.workload import Item, Phase, RunPlan
from foreshock.digests import digest_of_bytes
from foreshock.rollouts import decode_rollouts, encode_scores
from tests.service.working import LeaseHolder, lease_request, noisy, scores_of

_AGAIN = frozenset({408, 425, 429})
_LONGEST_WAIT_SECONDS = 0.3


@dataclass(slots=True)
class Journal:
    """The acknowledged requests, and the events that must not happen. Only appends, which the GIL makes thread-safe."""

    acknowledged: list[tuple[Item, int, dict[str, Any]]] = field(default_factory=list)
    advice: list[dict[str, Any]] = field(default_factory=list)
    """Answers to the single poller, in order."""
    scores: list[tuple[str, str]] = field(default_factory=list)
    """(scorer, digest) of acknowledged score shards."""
    completed_jobs: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    failed_requests: int = 0

    @property
    def answers(self) -> int:
        """Return the number of acknowledged requests so far."""
        return len(self.acknowledged) + len(self.advice) + len(self.scores) + len(self.completed_jobs)

    @property
    def shards(self) -> dict[tuple[int, int, int], Item]:
        """Return the acknowledged shards by (attempt, step, shard)."""
        return {item.key: item for item, _, _ in self.acknowledged if item.is_shard}


class RunSender:
    """Sends one plan to one service. `run` sends from the calling thread and from the threads of the ranks."""

    def __init__(self, url: str, plan: RunPlan, *, canonical: bool = False) -> None:
        self.plan = plan
        self.journal = Journal()
        self.run_id = ""
        self.replaying = False
        """True while a worker scores a probe of the run."""
        self._url = url
        self._canonical = canonical
        self._stop = threading.Event()

    def run(self) -> None:
        """Send the whole plan: a serial plan in `canonical` order by one thread, else by the threads of the ranks."""
        with httpx.Client(base_url=self._url, timeout=30) as http:
            for phase in self.plan.phases:
                self._register(http, phase)
                queues = [phase.canonical] if self._canonical else phase.queues
                threads = [threading.Thread(target=self._send_queue, args=(queue,)) for queue in queues[1:]]
                for thread in threads:
                    thread.start()
                self._send_all(http, queues[0])
                for thread in threads:
                    thread.join()
                if phase.probe and not self._stop.is_set():
                    self.replaying = True
                    self._replay(http, phase)
                    self.replaying = False

    @contextmanager
    def running(self) -> Iterator[threading.Thread]:
        """Send the plan in a thread of its own, which ends with the block; an error in the block stops it."""

        def send() -> None:
            with suppress(Stopped):
                self.run()

        thread = threading.Thread(target=send, name="senders")
        thread.start()
        try:
            yield thread
        except BaseException:
            self._stop.set()
            raise
        thread.join()

    def wait_for_answers(
        self, count: int, senders: threading.Thread, seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until `count` more requests are acknowledged, the senders end, or `seconds` have passed."""
        wanted, deadline = self.journal.answers + count, time.monotonic() + seconds
        while self.journal.answers < wanted and senders.is_alive() and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.002)

    def _register(self, http: httpx.Client, phase: Phase) -> None:
        body = {"key": self.plan.key, "initial_learning_rate": 1e-6, "advice_mode": "apply", "model_kind": "dense"}
        run = self._until_answered(lambda: http.post("/v1/runs", json=body))
        self.run_id = run.json()["id"]
        attempt = {"key": f"attempt-{phase.attempt}", "resume_step": phase.resume_step}
        answer = self._until_answered(lambda: http.post(f"/v1/runs/{self.run_id}/attempts", json=attempt))
        if answer.json()["attempt"] != phase.attempt:
            self.journal.refusals.append(f"attempt {phase.attempt} became {answer.json()['attempt']}")

    def _send_queue(self, queue: list[Item]) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            self._send_all(http, queue)

    def _send_all(self, http: httpx.Client, items: list[Item]) -> None:
        for item in items:
            if self._stop.is_set():
                return
            if item.kind == "poll":
                self._poll(http, item)
            else:
                self._send(http, item)

    def _send(self, http: httpx.Client, item: Item) -> None:
        def request() -> httpx.Response:
            url = f"/v1/runs/{self.run_id}/{item.path}"
            if item.body is not None:
                return http.request(item.method, url, params=item.query, json=item.body)
            headers = {"Content-Type": item.media_type}
            return http.request(item.method, url, params=item.query, content=item.content, headers=headers)

        answer = self._until_answered(request, f"{item.method} {item.path}")
        if answer.is_success:
            found = answer.json() if answer.content else {}
            self.journal.acknowledged.append((item, answer.status_code, found))
            if item.is_shard and found["digest"] != digest_of_bytes(item.content):
                self.journal.refusals.append(f"{item.path}: the receipt has another digest")

    def _poll(self, http: httpx.Client, item: Item) -> None:
        url = f"/v1/runs/{self.run_id}/lr-advice"
        # A trainer asks long after what it logged is worked out.
        run = f"/v1/runs/{self.run_id}"
        while self._until_answered(lambda: http.get(run), "run").json()["advancing"]:
            time.sleep(0.005)
        followed = {"step": item.step + 1, "attempt": item.attempt}
        self._until_answered(lambda: http.post(f"{url}/follow", json=followed), "follow")
        advice = self._until_answered(lambda: http.get(url, params=item.query), "poll").json()
        self.journal.advice.append(advice)
        body = {
            "attempt": item.attempt, "revision": advice["revision"], "step": item.step + 1,
            "applied_lr": 1e-6 * advice["scale"], "applied_scale": advice["scale"],
        }  # fmt: skip
        self._until_answered(lambda: http.post(f"{url}/ack", json=body), "acknowledgement")

    def _replay(self, http: httpx.Client, phase: Phase) -> None:
        """Announce weights, request a probe, and do its jobs as a worker does."""
        for item in phase.probe:
            self._send(http, item)
        probe = self._probe_of(http, phase.probe[-1].step)
        while not self._stop.is_set() and probe["state"] in ("queued", "leased", "running"):
            lease = self._until_answered(lambda: http.post("/v1/leases", json=lease_request()), "lease")
            if lease.status_code == 200:
                self._work(LeaseHolder(http, lease.json()))
            else:
                time.sleep(0.1)
            probe = self._probe_of(http, phase.probe[-1].step)
        if not self._stop.is_set() and probe["state"] != "done":
            self.journal.refusals.append(f"the probe of step {probe['step']} ended as {probe['state']}")

    def _work(self, holder: LeaseHolder) -> None:
        rollouts = self._until_answered(holder.get_rollouts, lost=True)
        if not rollouts.is_success:
            return
        batch = decode_rollouts(rollouts.content)
        for each in holder.lease["job"]["scorers"]:
            values = noisy(batch, seed=len(each["scorer"]))
            body = encode_scores(scores_of(batch, values, engine=each["scorer"].partition(".")[0]))
            answer = self._until_answered(partial(holder.put_scores, body, each["scorer"]), lost=True)
            if not answer.is_success:
                return
            self.journal.scores.append((each["scorer"], digest_of_bytes(body)))
        if self._until_answered(holder.complete, lost=True).is_success:
            self.journal.completed_jobs.append(holder.lease["job"]["id"])

    def _probe_of(self, http: httpx.Client, step: int) -> dict[str, Any]:
        url = f"/v1/runs/{self.run_id}/probes"
        answer = self._until_answered(lambda: http.get(url, params={"step": step}), "probes")
        found: dict[str, Any] = answer.json()["items"][0]
        return found

    def _until_answered(
        self, request: Callable[[], httpx.Response], what: str = "", *, lost: bool = False
    ) -> httpx.Response:
        """Return the final answer. `lost`: a 409 that says that the lease was lost is allowed."""
        while True:
            wait = 0.05
            try:
                answer = request()
            except httpx.TransportError:
                self.journal.failed_requests += 1
            else:
                if answer.status_code < 500 and answer.status_code not in _AGAIN:
                    if not (answer.is_success or (lost and answer.status_code in (404, 409))):
                        self.journal.refusals.append(f"{what}: {answer.status_code} {answer.text[:300]}")
                    return answer
                self.journal.failed_requests += 1
                wait = min(float(answer.headers.get("Retry-After", "0.05")), _LONGEST_WAIT_SECONDS)
            if self._stop.is_set():
                raise Stopped
            time.sleep(wait)


class Stopped(Exception):
    """The sender was told to stop."""
