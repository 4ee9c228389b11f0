"""Exact divergences through the service: requested, leased, sent by the worker, published and read."""

from typing import Any

import httpx
import pytest

from foreshock.api.records import to_json
from foreshock.measures.exact import measure_exact
from foreshock.rollouts import RolloutBatch
from tests.foreshock.measures.exact_values import random_exact
from tests.service.sending import Sender, make_batch, problem_of
from tests.service.working import PAIR, WEIGHTS, LeaseHolder, ask_for_probe, run_to_probe, take_lease, work_off

NAME = "exact(torch.trainer, vllm.prefill)"


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run whose step 1 waits to be probed."""
    return run_to_probe(http, 1)


@pytest.fixture
def holder(run: Sender) -> LeaseHolder:
    ask_for_probe(run, 1, (), exact_pairs=[PAIR]).raise_for_status()
    return take_lease(run.http, exact_pairs=[PAIR])


def exact_for(rollouts: RolloutBatch, seed: int = 1, **fingerprint: object) -> dict[str, Any]:
    """Return the comparison that a worker could send for these rollouts."""
    values = random_exact(rollouts.num_tokens, seed)
    measures = measure_exact(values, rollouts.response_offsets, rollouts.generated, rollouts.group_ids)
    prints = {f"{side}_fingerprint": {"engine": engine, **fingerprint}
              for side, engine in (("target", "torch"), ("behaviour", "vllm"))}  # fmt: skip
    return {**to_json(measures), **prints, "pair": PAIR}


def publish(run: Sender, exact: dict[str, Any] | None = None, **probe: object) -> dict[str, Any]:
    ask_for_probe(run, 1, (), exact_pairs=[PAIR], **probe).raise_for_status()
    holder = take_lease(run.http, exact_pairs=[PAIR])
    sent = exact_for(holder.rollouts()) if exact is None else exact
    holder.put_document(sent).raise_for_status()
    holder.complete().raise_for_status()
    return sent


def test_published_comparison_is_that_of_the_worker(run: Sender) -> None:
    sent = publish(run)
    (read,) = run.get("steps/1/exact").json()["items"]
    assert sent.items() <= read.items()
    assert (read["tokens"], read["rollouts"], read["groups"]) == (make_batch(12).num_tokens, 12, 6)
    assert (read["name"], read["target"], read["behaviour"]) == (NAME, "torch.trainer", "vllm.prefill")
    assert read["from_sample"] is False


def test_a_job_of_a_pair_waits_for_a_worker_that_offers_it(run: Sender) -> None:
    body = ask_for_probe(run, 1, ["vllm.prefill"], exact_pairs=[PAIR]).json()
    assert [(job["engine"], job["exact_pairs"]) for job in body["jobs"]] == [("exact", [PAIR]), ("vllm", [])]
    assert work_off(run.http) == 1
    waiting = run.http.get(f"/v1/probes/{body['id']}").json()
    assert (waiting["state"], f"waiting for a worker that offers {NAME}" in waiting["reason"]) == ("running", True)
    holder = take_lease(run.http, exact_pairs=[PAIR])
    assert (holder.lease["job"]["exact_pairs"], holder.lease["job"]["scorers"]) == ([PAIR], [])


def test_options_of_both_scorers_reach_the_job(run: Sender) -> None:
    options = {"torch.trainer": {"autocast": None}, "vllm.prefill": {"dtype": "float32"}}
    ask_for_probe(run, 1, (), exact_pairs=[PAIR], options=options).raise_for_status()
    assert take_lease(run.http, exact_pairs=[PAIR]).lease["job"]["options"] == options
    unused = ask_for_probe(run, 1, (), exact_pairs=[PAIR], options={"torch.float32": {}})
    assert unused.json()["type"] == "urn:foreshock:problem:probe-not-possible"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_unknown_and_repeated_pairs_are_refused(run: Sender) -> None:
    for pairs in (["vllm.prefill/torch.trainer"], [PAIR, PAIR], ["no pair"]):
        assert ask_for_probe(run, 1, (), exact_pairs=pairs).status_code == 422


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_comparisons_that_do_not_fit_are_refused(holder: LeaseHolder) -> None:
    good = exact_for(holder.rollouts(), weights_digest=WEIGHTS)
    for changed, said in (
        ({"pair": "vllm.prefill/torch.trainer"}, "expected those of torch.trainer/vllm.prefill"),
        ({"tokens": good["tokens"] + 1}, "expected at most"),
        ({"non_finite": -1}, "counts must be at least 0"),
        ({"kl": good["kl"] | {"mean": -0.1}}, "must be at least 0"),
        ({"delta_max": 1.5}, "at most 1"),
        ({"target_fingerprint": {"engine": "torch", "weights_digest": "sha256:" + "00" * 32}}, "those of the probe"),
    ):
        answer = holder.put_document(good | changed)
        assert problem_of(answer) == (422, "result-not-asked"), changed
        assert said in answer.json()["detail"]
    assert holder.complete().json()["type"] == "urn:foreshock:problem:result-incomplete"
    assert holder.put_document(good).status_code == 204


def test_values_without_an_estimate_are_null(run: Sender) -> None:
    unknown = {"mean": None, "low": None, "high": None}
    publish(run, exact_for(make_batch(12)) | {"kl": unknown, "delta_max": None, "tokens": 0, "non_finite": 3})
    (read,) = run.get("steps/1/exact").json()["items"]
    assert (read["kl"], read["delta_max"], read["non_finite"]) == (unknown, None, 3)


def test_steps_without_divergences_name_the_request_that_makes_them(run: Sender) -> None:
    answer = run.get("steps/1/exact")
    assert problem_of(answer) == (404, "result-not-found")
    assert f"foreshock probe {run.run} 1 --exact" in answer.json()["detail"]


def test_a_sample_says_so_and_does_not_hide_the_whole_step(run: Sender) -> None:
    publish(run)
    publish(run, max_rollouts=4)
    (read,) = run.get("steps/1/exact").json()["items"]
    assert (read["rollouts"], read["from_sample"]) == (12, False)


def test_attribution_has_the_exact_divergence_of_its_link_and_says_its_size(run: Sender) -> None:
    ask_for_probe(run, 1, ["torch.trainer", "vllm.prefill"]).raise_for_status()
    work_off(run.http)
    before = run.get("steps/1/attribution").json()
    assert (before["exact"], "exact" in _kinds(before)) == ([], False)
    publish(run)
    read = run.get("steps/1/attribution").json()
    (exact,) = read["exact"]
    assert exact["kl"] == run.get("steps/1/exact").json()["items"][0]["kl"]
    # The scores of `work_off` are of another dtype than these divergences.
    assert exact["other_settings"] == ["dtype"]
    (said,) = [each for each in read["conclusions"] if each["kind"] == "exact"]
    assert said["sentence"].startswith(f"{NAME}: KL(μ‖π) over the whole vocabulary is")
    assert (said["link"], said["names_cause"]) == (PAIR, False)


def test_pages_show_the_exact_divergence_in_place_of_k3_only_if_settings_are_equal(run: Sender) -> None:
    ask_for_probe(run, 1, ["torch.trainer", "vllm.prefill"]).raise_for_status()
    work_off(run.http)
    publish(run)
    page = f"/runs/{run.run}/steps/1"
    assert "(exact)" not in run.http.get(page).text
    rollouts = make_batch(12)
    # The fingerprints of `work_off`.
    publish(run, exact_for(rollouts, dtype="bfloat16"), max_rollouts=100)
    shown = run.http.get(page).text
    assert "(exact)" in shown
    assert "in place of k3" in shown


def _kinds(attribution: dict[str, Any]) -> set[str]:
    return {each["kind"] for each in attribution["conclusions"]}
