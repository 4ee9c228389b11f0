"""A lease without heartbeats expires: another worker gets the job, and the late one is refused."""

from __future__ import annotations

import httpx
import pytest
from sqlalchemy.orm import Session

from foreshock_service.platform.database.engine import database_now_us
from tests.service.sending import Sender
from tests.service.working import ask_for_lease, ask_for_probe, noisy, scores_of, take_lease

LEASE_SECONDS = 60


class Clock:
    """The database's time and the offset that a test adds to it, so that no test waits."""

    def __init__(self) -> None:
        self.ahead_us = 0

    def read(self, session: Session) -> int:
        """Return the database's time plus the offset."""
        return database_now_us(session) + self.ahead_us

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass."""
        self.ahead_us += int(seconds * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of leases, scores and probes."""
    clock = Clock()
    for module in (
        "foreshock_service.replay.leases.service",
        "foreshock_service.replay.results.publishing",
        "foreshock_service.replay.probes.requests",
        "foreshock_service.replay.probes.service",
    ):
        monkeypatch.setattr(f"{module}.database_now_us", clock.read)
    return clock


def test_worker_with_an_expired_lease_is_refused_and_the_next_one_completes_the_job(
    http: httpx.Client, run: Sender, clock: Clock
) -> None:
    probe = ask_for_probe(run, 3).json()["id"]
    late = take_lease(http, "late")
    rollouts = late.rollouts()
    late.put_scores(scores_of(rollouts, noisy(rollouts, 1))).raise_for_status()
    clock.pass_seconds(LEASE_SECONDS + 1)
    newer = take_lease(http, "newer")
    assert newer.token > late.token
    wrong = scores_of(rollouts, noisy(rollouts, 7))
    for answer in (
        late.heartbeat(),
        late.get_rollouts(),
        late.put_scores(wrong, shard=1),
        late.complete(),
        late.fail("final"),
    ):
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:foreshock:problem:lease-lost")

    newer.put_scores(scores_of(rollouts, noisy(rollouts, 2))).raise_for_status()
    newer.complete().raise_for_status()
    items = run.get("steps/3/tokens", comparison="vllm.prefill/rollout", worst=1000).json()["items"]
    shown = {(each["sample_id"], each["position"]): each["log_probs"]["vllm.prefill"] for each in items}
    expected = noisy(rollouts, 2)
    assert shown[rollouts.sample_ids[0], 0] == pytest.approx(float(expected[0]))
    read = http.get(f"/v1/probes/{probe}").json()
    assert read["jobs"][0]["worker"] == "newer"
    assert read["jobs"][0]["reasons"] == ["try 1 on late: lease expired: no heartbeat for 60 s"]


def test_lease_that_was_granted_before_the_clock_was_set_back_expires(
    http: httpx.Client, run: Sender, clock: Clock
) -> None:
    ask_for_probe(run, 3)
    late = take_lease(http, "late")
    clock.pass_seconds(-5)
    assert ask_for_lease(http, "newer").status_code == 204
    clock.pass_seconds(-3600)
    take_lease(http, "newer")
    assert late.heartbeat().status_code == 409
