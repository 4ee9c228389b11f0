"""Exact divergences through the service: requested, leased, uploaded once, measured, published and read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from sqlalchemy import update

from foreshock.api.replays import ExactMeasures
from foreshock.measures.exact import measure_exact
from foreshock.rollouts import ExactBatch, RolloutBatch, decode_exact
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.database.tables import ExactDivergence
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.events import StepKey
from tests.foreshock.rollouts.exact_batches import exact_of, random_log_probs, sampled_from
from tests.service.sending import Sender, make_batch
from tests.service.stored import list_files
from tests.service.working import (
    PAIR,
    WEIGHTS,
    LeaseHolder,
    ask_for_probe,
    run_to_probe,
    take_lease,
    work_off,
)

NAME = "exact(torch.trainer, vllm.prefill)"


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run whose step 1 waits to be probed."""
    return run_to_probe(http, 1)


@pytest.fixture
def holder(run: Sender) -> LeaseHolder:
    """A worker that holds the job of an exact probe."""
    ask_for_probe(run, 1, (), exact_pairs=[PAIR]).raise_for_status()
    return take_lease(run.http, exact_pairs=[PAIR])


def exact_for(rollouts: RolloutBatch, seed: int = 1, **fingerprint: object) -> ExactBatch:
    """Return divergences that a worker could send for these rollouts."""
    target, behaviour = random_log_probs(rollouts.num_tokens, seed)
    chosen = sampled_from(behaviour, seed)
    lengths = rollouts.response_lengths.tolist()
    return exact_of(rollouts.sample_ids, lengths, target, behaviour, chosen, **fingerprint)


def publish(run: Sender, exact: ExactBatch | None = None, **probe: object) -> ExactBatch:
    """Probe step 1 and answer with these divergences."""
    ask_for_probe(run, 1, (), exact_pairs=[PAIR], **probe).raise_for_status()
    holder = take_lease(run.http, exact_pairs=[PAIR])
    sent = exact_for(holder.rollouts()) if exact is None else exact
    holder.put_exact(sent).raise_for_status()
    holder.complete().raise_for_status()
    return sent


def test_published_divergences_are_those_of_the_upload_measured(run: Sender) -> None:
    rollouts = make_batch(12)
    sent = publish(run)
    (read,) = run.get("steps/1/exact").json()["items"]
    expected = measure_exact(sent, group_ids=rollouts.group_ids)
    for name in ("kl", "reverse_kl", "tv", "top1_flip", "target_entropy", "behaviour_entropy", "k3_kl"):
        interval = getattr(expected, name)
        assert read[name]["mean"] == pytest.approx(interval.mean, rel=1e-12), name
        assert read[name]["low"] == pytest.approx(interval.low, rel=1e-12), name
        assert read[name]["high"] == pytest.approx(interval.high, rel=1e-12), name
    assert read["delta_max"] == expected.delta_max
    assert (read["tokens"], read["rollouts"], read["groups"]) == (rollouts.num_tokens, 12, 6)
    assert (read["pair"], read["name"]) == (PAIR, NAME)
    assert (read["target"], read["behaviour"]) == ("torch.trainer", "vllm.prefill")
    assert (read["target_fingerprint"]["engine"], read["behaviour_fingerprint"]["engine"]) == ("torch", "vllm")
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


def test_an_equal_request_is_the_same_probe(run: Sender) -> None:
    first = ask_for_probe(run, 1, (), exact_pairs=[PAIR])
    assert (ask_for_probe(run, 1, (), exact_pairs=[PAIR]).status_code, first.status_code) == (200, 201)
    assert ask_for_probe(run, 1, ["torch.trainer"], exact_pairs=[PAIR]).status_code == 201


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_unknown_and_repeated_pairs_are_refused(run: Sender) -> None:
    for pairs in (["vllm.prefill/torch.trainer"], [PAIR, PAIR], ["no pair"]):
        assert ask_for_probe(run, 1, (), exact_pairs=pairs).status_code == 422


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_divergences_that_do_not_fit_are_refused(holder: LeaseHolder, settings: Settings) -> None:
    good = exact_for(holder.rollouts())
    kl, offsets = good.kl.copy(), good.offsets.copy()
    kl[offsets[2]] = -0.1
    offsets[1] += 1 if np.diff(offsets)[1] else 0
    for spoilt, row in ((dataclasses.replace(good, kl=kl), 2), (dataclasses.replace(good, offsets=offsets), 0)):
        answer = holder.put_exact(spoilt)
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (422, "urn:foreshock:problem:invalid-rollouts"), problem
        assert (problem["row"], problem["column"]) == (row, "kl")
    assert not list(Path(settings.store_url).glob("*/*/*/exact/*"))
    assert not [name for name in list_files(settings) if name.startswith("temporary/")]
    assert holder.complete().status_code == 409


def test_other_weights_and_other_pairs_are_refused(holder: LeaseHolder) -> None:
    rollouts = holder.rollouts()
    wrong = holder.put_exact(exact_for(rollouts, weights_digest="sha256:" + "00" * 32))
    assert (wrong.status_code, wrong.json()["type"]) == (422, "urn:foreshock:problem:wrong-fingerprint")
    other = holder.put_exact(exact_for(rollouts), pair="vllm.prefill/torch.trainer")
    assert (other.status_code, other.json()["type"]) == (422, "urn:foreshock:problem:result-not-asked")
    assert holder.put_exact(exact_for(rollouts, weights_digest=WEIGHTS)).status_code == 201


def test_states_that_are_not_finite_are_counted_apart(run: Sender) -> None:
    rollouts = make_batch(12)
    exact = exact_for(rollouts)
    kl, tv = exact.kl.copy(), exact.tv.copy()
    kl[3], tv[7] = np.inf, np.nan
    publish(run, dataclasses.replace(exact, kl=kl, tv=tv))
    (read,) = run.get("steps/1/exact").json()["items"]
    assert (read["non_finite"], read["tokens"]) == (2, rollouts.num_tokens - 2)
    assert read["kl"]["mean"] == pytest.approx(np.delete(exact.kl.astype(np.float64), [3, 7]).mean(), rel=1e-12)


def test_steps_without_divergences_name_the_request_that_makes_them(run: Sender) -> None:
    answer = run.get("steps/1/exact")
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:foreshock:problem:exact-not-found")
    assert f'"exact_pairs": ["{PAIR}"]' in answer.json()["detail"]


def test_a_sample_says_so_and_does_not_hide_the_whole_step(run: Sender) -> None:
    publish(run)
    publish(run, max_rollouts=4)
    (read,) = run.get("steps/1/exact").json()["items"]
    assert (read["rollouts"], read["from_sample"]) == (12, False)


def test_remeasuring_gives_the_measures_of_the_stored_files(run: Sender, app: FastAPI, settings: Settings) -> None:
    sent = publish(run)
    before = run.get("steps/1/exact").json()
    nothing = {"mean": 0.0, "low": 0.0, "high": 0.0}
    changed = {name: nothing if isinstance(value, dict) else value for name, value in before["items"][0].items()}
    changed = {name: changed[name] for name in ExactMeasures.__slots__}
    app.state.context.database.write(lambda session: session.execute(update(ExactDivergence).values(measures=changed)))
    assert run.get("steps/1/exact").json() != before
    key = StepKey(run.run, run.attempt, 1)
    assert remeasure_step(app.state.context, key).left is None
    assert run.get("steps/1/exact").json() == before
    (file,) = Path(settings.store_url).glob("*/*/*/exact/*")
    np.testing.assert_array_equal(decode_exact(file.read_bytes()).kl, sent.kl)
    file.unlink()
    left = remeasure_step(app.state.context, key).left
    assert left is not None
    assert "files of its exact divergences are missing" in left


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
