"""A lease ends without heartbeats: the job goes on to another worker, and the late one is refused."""

from __future__ import annotations

import time

import httpx
import pytest

from service.settings import Settings
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import announce_checkpoint, ask_for_lease, ask_for_probe, noisy, scores_of, take_lease

# Short enough to wait for, and far longer than the pauses of a busy machine between two heartbeats.
LEASE_SECONDS = 2.0
LONGER = LEASE_SECONDS + 0.2


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Leases that end soon, so that tests can wait for it."""
    return settings.model_copy(update={"lease_seconds": LEASE_SECONDS})


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with one closed step and its checkpoint."""
    sender = start_run(http)
    sender.put_shard(3, make_batch(6)).raise_for_status()
    announce_checkpoint(sender, 3)
    return sender


def test_a_late_worker_is_refused_and_the_next_one_counts(http: httpx.Client, run: Sender) -> None:
    probe = ask_for_probe(run, 3).json()["id"]
    late = take_lease(http, "late")
    rollouts = late.rollouts()
    late.put_scores(scores_of(rollouts, noisy(rollouts, 1))).raise_for_status()
    time.sleep(LONGER)
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
    assert read["jobs"][0]["reasons"] == ["try 1 on late: the worker was not heard of in time"]


def test_heartbeats_keep_a_lease_beyond_its_time(http: httpx.Client, run: Sender) -> None:
    ask_for_probe(run, 3)
    holder = take_lease(http)
    for _ in range(6):
        time.sleep(LEASE_SECONDS / 5)
        assert holder.heartbeat().status_code == 200
        assert ask_for_lease(http, "other").status_code == 204


def test_silence_counts_as_a_try(http: httpx.Client, run: Sender) -> None:
    probe = ask_for_probe(run, 3).json()["id"]
    for number in range(3):
        take_lease(http, f"w{number}")
        time.sleep(LONGER)
    assert ask_for_lease(http).status_code == 204
    assert http.get(f"/v1/probes/{probe}").json()["state"] == "failed"
