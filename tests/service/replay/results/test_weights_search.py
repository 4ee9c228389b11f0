"""Weights searches over HTTP: what is requested, what a worker sends, when it counts, and what is shown of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from foreshock.clock import now_us
from foreshock.probe_kinds import WEIGHTS as WEIGHTS_KIND
from foreshock.weights_search import WeightsReplay, WeightsSearch
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import (
    EVERYTHING,
    WEIGHTS,
    LeaseHolder,
    announce_checkpoint,
    ask_for_lease,
    noisy,
    scores_of,
    take_lease,
)

STEP = 60
ABLE = (*EVERYTHING, WEIGHTS_KIND.capability)


def digest(number: int) -> str:
    return "sha256:" + f"{number:064x}"


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with one closed step and the checkpoints of five steps."""
    sender = start_run(http)
    sender.put_shard(STEP, make_batch(12)).raise_for_status()
    for step in (1, 20, 40, 59, STEP, 80):
        announce_checkpoint(sender, step, WEIGHTS if step == STEP else digest(step))
    return sender


def ask(run: Sender, **fields: Any) -> httpx.Response:
    """Request a search."""
    return run.http.post(f"/v1/runs/{run.run}/probes", json={"step": STEP, "kind": "weights", **fields})


def found(best: float = 4e-14) -> dict[str, Any]:
    """Return a worker's result: the head of step 1 gives the logged log-probs."""
    replays = (
        WeightsReplay(STEP, "all", 1.8e-2, 1.5e-2, 2.1e-2, 2.0),
        WeightsReplay(59, "all", 1.7e-2, 1.4e-2, 2.0e-2, 2.0),
        WeightsReplay(40, "all", skipped="there are no weights of step 40"),
        WeightsReplay(1, "lm_head", best, best, best, 1e-6),
    )
    search = WeightsSearch(STEP, "vllm.prefill", 12, 80, 0.0, replays=replays, confirmed_k3=best, ended="found")
    return search.to_dict()


def put_search(holder: LeaseHolder, body: dict[str, Any]) -> httpx.Response:
    headers = {"X-Foreshock-Lease-Token": str(holder.token)}
    return holder.http.put(f"{holder.url}/weights-search", json=body, headers=headers)


def put_scores(holder: LeaseHolder) -> None:
    """Send the scores of the announced weights and of their noise floor."""
    rollouts = holder.rollouts()
    for each in holder.lease["job"]["scorers"]:
        body = scores_of(rollouts, noisy(rollouts, 1))
        holder.put_scores(body, each["scorer"], variant=each["variant"]).raise_for_status()


def test_search_is_one_job_with_the_nearest_and_the_first_earlier_checkpoints(run: Sender, http: httpx.Client) -> None:
    probe = ask(run, max_candidates=3).raise_for_status().json()
    assert (probe["kind"], len(probe["jobs"])) == ("weights", 1)
    job = take_lease(http, scorers=ABLE).lease["job"]
    assert [(each["scorer"], each["variant"]) for each in job["scorers"]] == [
        ("vllm.prefill", ""),
        ("vllm.prefill", "rebatched"),
    ]
    assert [each["step"] for each in job["candidates"]] == [59, 1, 40]
    assert job["candidates"][0]["digest"] == digest(59)
    assert job["checkpoint"]["step"] == STEP


def test_worker_that_cannot_search_gets_no_search(run: Sender, http: httpx.Client) -> None:
    assert ask_for_lease(http, "old", scorers=EVERYTHING).status_code == 204
    probe = ask(run).raise_for_status().json()
    assert ask_for_lease(http, "old", scorers=EVERYTHING).status_code == 204
    assert f"waiting for a worker that offers {WEIGHTS_KIND.capability}" in str(probe["reason"])


def test_equal_search_is_the_same_probe_until_other_checkpoints_are_announced(run: Sender) -> None:
    first, again = ask(run), ask(run, scorers=[{"scorer": "vllm.prefill"}])
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    announce_checkpoint(run, 58, digest(58))
    assert ask(run).status_code == 201


def test_result_counts_when_the_job_is_complete(run: Sender, http: httpx.Client) -> None:
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    put_scores(holder)
    missing = holder.complete()
    assert (missing.status_code, missing.json()["type"].rpartition(":")[2]) == (409, "result-incomplete")
    assert put_search(holder, found(best=3e-3)).status_code == 204
    assert put_search(holder, found()).status_code == 204
    answer = run.get(f"steps/{STEP}/weights-search")
    assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (404, "weights-search-not-found")
    assert holder.complete().status_code == 204
    assert holder.complete().status_code == 204
    read = run.get(f"steps/{STEP}/weights-search").raise_for_status().json()
    assert [each["weights"] for each in read["replays"]] == [
        "the weights of step 60",
        "the weights of step 59",
        "the weights of step 40",
        "the lm_head of step 1",
    ]
    assert [each["at_noise_floor"] for each in read["replays"]] == [False, False, False, True]
    assert [each["announced"] for each in read["replays"]] == [True, False, False, False]
    assert (read["replays"][3]["k3_kl"], read["bound"]) == (4e-14, 1e-6)
    attribution = run.get(f"steps/{STEP}/attribution").raise_for_status().json()
    assert attribution["weights_search"] == read
    blamed = [each for each in attribution["conclusions"] if each["kind"] == "wrong-weights"]
    assert len(blamed) == 1
    assert blamed[0]["names_cause"]
    assert blamed[0]["sentence"].startswith("The engine at step 60 ran with the lm_head of step 1 ")
    page = http.get(f"/runs/{run.run}/steps/{STEP}").raise_for_status().text
    assert "Replays with other weights" in page
    assert blamed[0]["sentence"] in page


def test_result_of_a_lost_lease_does_not_count(run: Sender, http: httpx.Client) -> None:
    ask(run).raise_for_status()
    first = take_lease(http, scorers=ABLE)
    put_search(first, found()).raise_for_status()
    assert first.fail("retry").status_code == 204
    assert put_search(first, found()).status_code == 409
    second = take_lease(http, "w2", scorers=ABLE)
    put_scores(second)
    # The first try's result is not that of the second.
    assert second.complete().status_code == 409
    put_search(second, found(best=2e-3)).raise_for_status()
    assert second.complete().status_code == 204
    assert run.get(f"steps/{STEP}/weights-search").json()["replays"][3]["k3_kl"] == 2e-3


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"step": 61}, 422),
        ({"scorer": "torch.float32"}, 422),
        ({"replays": [{"step": 1, "part": "../../etc"}]}, 422),
        ({"replays": [{"step": 1, "part": "all", "k3_kl": -1.0}]}, 422),
        ({"replays": [{"step": 1, "part": "all"}] * 1001}, 422),
        ({"ended": "a\x00b"}, 422),
        ({"unknown": 1}, 422),
    ],
)
def test_invalid_result_is_refused(run: Sender, http: httpx.Client, change: dict[str, Any], status: int) -> None:
    ask(run).raise_for_status()
    holder = take_lease(http, scorers=ABLE)
    answer = put_search(holder, found() | change)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


def test_job_of_another_kind_takes_no_result(run: Sender, http: httpx.Client) -> None:
    body = {"step": STEP, "scorers": [{"scorer": "vllm.prefill"}]}
    http.post(f"/v1/runs/{run.run}/probes", json=body).raise_for_status()
    answer = put_search(take_lease(http, scorers=ABLE), found())
    assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (422, "result-not-asked")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "fields",
    [
        {"scorers": [{"scorer": "vllm.prefill"}, {"scorer": "torch.float32"}]},
        {"scorers": [{"scorer": "vllm.prefill", "variant": "rebatched"}]},
        {"scorers": [{"scorer": "no.such"}]},
        {"max_candidates": 0},
        {"max_candidates": 33},
    ],
)
def test_invalid_request_is_refused(run: Sender, fields: dict[str, Any]) -> None:
    assert ask(run, **fields).status_code == 422


def test_search_without_an_earlier_checkpoint_is_not_possible(http: httpx.Client) -> None:
    run = start_run(http)
    run.put_shard(STEP, make_batch(4)).raise_for_status()
    announce_checkpoint(run, STEP)
    for fields in ({}, {"expires_at_us": now_us() - 1}):
        if fields:
            announce_checkpoint(run, 59, digest(59), **fields)
        answer = ask(run)
        assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (422, "probe-not-possible")
        assert "no checkpoint of a step before 60 is announced" in answer.json()["detail"]


def test_search_needs_the_log_probs_of_the_engine(http: httpx.Client) -> None:
    run = start_run(http)
    run.put_shard(STEP, replace(make_batch(4), rollout_log_probs=None)).raise_for_status()
    announce_checkpoint(run, STEP)
    announce_checkpoint(run, 59, digest(59))
    answer = ask(run)
    assert answer.status_code == 422
    assert "have no rollout_log_probs" in answer.json()["detail"]


def test_candidates_are_those_that_led_to_the_step(run: Sender, http: httpx.Client) -> None:
    resumed = run.new_attempt("second", 50)
    resumed.put_shard(STEP, make_batch(12, seed=1)).raise_for_status()
    announce_checkpoint(resumed, STEP, digest(1060))
    announce_checkpoint(resumed, 55, digest(1055))
    ask(resumed).raise_for_status()
    job = take_lease(http, scorers=ABLE).lease["job"]
    # Step 59 of the first attempt was superseded.
    assert sorted(each["digest"] for each in job["candidates"]) == sorted(map(digest, (1, 20, 40, 1055)))


def test_search_of_a_run_without_one_is_not_found(run: Sender) -> None:
    assert run.get(f"steps/{STEP}/weights-search").status_code == 404
    assert run.get("steps/7/weights-search").status_code == 404
