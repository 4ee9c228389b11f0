"""The doctor over HTTP: what is requested, what a worker sends, when it counts, and where its causes stand."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from foreshock.api.doctor import DoctorReport, Finding, NotTried, RuledOut, SideReport
from foreshock.api.records import parse, to_json
from foreshock.clock import now_us
from foreshock.probe_kinds import DOCTOR
from tests.service import working
from tests.service.runs.test_weights import holding, report
from tests.service.sending import Sender, make_batch, problem_of, start_run

STEP = 60
ABLE = (*working.EVERYTHING, DOCTOR.capability)
SENTENCE = "the engine's logged log-probs (μ) are those of the weights step 1"


def digest(number: int) -> str:
    return "sha256:" + f"{number:064x}"


@pytest.fixture
def run(http: httpx.Client) -> Sender:
    """A run with one closed step and the checkpoints of six steps."""
    sender = working.run_to_probe(http, STEP)
    for step in (1, 20, 40, 59, 80):
        working.announce_checkpoint(sender, step, digest(step))
    return sender


def ask(run: Sender, **fields: Any) -> httpx.Response:
    return run.http.post(f"/v1/runs/{run.run}/probes", json={"step": STEP, "kind": DOCTOR.name, **fields})


def found(holder: working.LeaseHolder, share: float = 0.998) -> dict[str, Any]:
    """Return a worker's report: the weights of step 1 reproduce μ."""
    counted = holder.lease["job"]["rollouts"]
    finding = Finding(
        *("cause", "rollout", "other_weights", "step 1", SENTENCE, counted["tokens"], counted["count"]),
        share=share,
        share_low=0.99,
        share_high=1.0,
        before=4.8e-2,
        after=1.1e-4,
        exact=True,
        fixes={"any": "verify the weight sync", "SGLang": "POST /weights_checker"},
        confirm="compare checksums",
    )
    report = DoctorReport(
        rollouts=counted["count"],
        tokens=counted["tokens"],
        findings=(finding,),
        sides=(SideReport("rollout", "bfloat16", 4.8e-2, 1.1e-4, 1e-5, float("nan")),),
        ruled_out=(RuledOut("positions zero", 0.2),),
        not_tried=(NotTried("step 40", "there are no weights of step 40"),),
        replays=6,
        seconds=1.5,
        ended="the search is complete",
    )
    return to_json(report)


def examined(run: Sender, **fields: Any) -> None:
    """Ask for an examination and answer as a worker."""
    ask(run, **fields).raise_for_status()
    holder = working.take_lease(run.http, scorers=ABLE)
    holder.put_document(found(holder)).raise_for_status()
    holder.complete().raise_for_status()


def test_examination_is_one_job_with_the_nearest_and_the_first_checkpoints(run: Sender, http: httpx.Client) -> None:
    probe = ask(run, max_candidates=3, budget_seconds=90).raise_for_status().json()
    assert (probe["kind"], len(probe["jobs"])) == ("doctor", 1)
    job = working.take_lease(http, scorers=ABLE).lease["job"]
    assert [each["step"] for each in job["candidates"]] == [59, 1, 40]
    assert (job["checkpoint"]["step"], job["budget_seconds"]) == (STEP, 90.0)
    assert job["candidates"][0]["digest"] == digest(59)


def test_checksums_of_the_engines_stand_beside_the_cause(run: Sender, app: FastAPI) -> None:
    report(run, 1, holding(1))
    report(run, STEP, holding(STEP), {"0": holding(1)})
    examined(run)
    said = run.get(f"steps/{STEP}/doctor").raise_for_status().json()["checksums"]
    assert said == [f"Engine 0 of 8 holds step 1, while the trainer is at step {STEP}."]
    found = run.get("findings", source="doctor").raise_for_status().json()["items"]
    assert said[0] in found[0]["sentence"]


def test_weights_of_another_run_are_tried_first(run: Sender, http: httpx.Client) -> None:
    other = start_run(http, "another")
    for step in (30, STEP - 5, STEP + 5):
        working.announce_checkpoint(other, step, digest(step))
    ask(run, max_candidates=1, against=other.run).raise_for_status()
    first, second = working.take_lease(http, scorers=ABLE).lease["job"]["candidates"]
    title = http.get(f"/v1/runs/{other.run}").raise_for_status().json()["key"]
    assert (first["step"], first["run"]) == (STEP - 5, title)
    assert (second["step"], second["run"]) == (59, "")


def test_a_run_without_weights_is_nothing_to_compare_with(run: Sender, http: httpx.Client) -> None:
    other = start_run(http, "another")
    working.announce_checkpoint(other, STEP + 5, digest(1))
    refused = ask(run, against=other.run)
    assert (refused.status_code, refused.json()["type"]) == (422, ask(run, against=run.run).json()["type"])
    assert f"no announced weights up to step {STEP}" in refused.json()["detail"]
    assert ask(run, against="run_unknown").status_code == 404


def test_equal_request_is_the_same_probe_until_other_checkpoints_are_announced(run: Sender) -> None:
    first, again = ask(run), ask(run)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    working.announce_checkpoint(run, 58, digest(58))
    assert ask(run).status_code == 201


def test_a_step_without_earlier_checkpoints_can_be_examined(sender: Sender, http: httpx.Client) -> None:
    sender.put_shard(STEP, make_batch(4)).raise_for_status()
    working.announce_checkpoint(sender, STEP)
    working.announce_checkpoint(sender, 59, digest(59), expires_at_us=now_us() - 1)
    ask(sender).raise_for_status()
    assert working.take_lease(http, scorers=ABLE).lease["job"]["candidates"] == []


def test_a_heartbeat_says_what_is_being_tried(run: Sender, http: httpx.Client) -> None:
    probe = ask(run).raise_for_status().json()["id"]
    holder = working.take_lease(http, scorers=ABLE)
    doing = "other_weights, step 1: E[d²]/2 1.1e-04"
    http.post(f"{holder.url}/heartbeat", json={"token": holder.token, "doing": doing}).raise_for_status()
    assert http.get(f"/v1/probes/{probe}").json()["jobs"][0]["doing"] == doing
    assert doing in http.get(f"/runs/{run.run}/steps/{STEP}").text


def test_published_report_is_read(run: Sender, http: httpx.Client) -> None:
    answer = run.get(f"steps/{STEP}/doctor")
    assert problem_of(answer) == (404, "result-not-found")
    assert run.get("steps/7/doctor").status_code == 404
    ask(run).raise_for_status()
    holder = working.take_lease(http, scorers=ABLE)
    holder.put_document(found(holder, share=0.5)).raise_for_status()
    holder.put_document(found(holder)).raise_for_status()
    holder.complete().raise_for_status()
    read = run.get(f"steps/{STEP}/doctor").raise_for_status().json()
    assert (read["step"], read["from_sample"]) == (STEP, False)
    assert parse(DoctorReport, read["report"]).causes[0].share == 0.998
    assert read["report"]["sides"][0]["rounding"] is None


def test_pages_show_found_ruled_out_not_tried_and_next(run: Sender, http: httpx.Client) -> None:
    before = http.get(f"/runs/{run.run}/steps/{STEP}").text
    assert "Examine this step" in before
    examined(run)
    for page in (f"/runs/{run.run}/steps/{STEP}", f"/pages/runs/{run.run}/probes"):
        text = http.get(page).raise_for_status().text
        for part in (SENTENCE[1:].replace("'", "&#39;"), "explains 99.8 %", "Verify the weight sync", "positions zero"):
            assert part in text
        assert "Next: compare checksums" in text
        assert "there are no weights of step 40" in text


def test_the_button_of_a_page_asks_for_an_examination(run: Sender, http: httpx.Client) -> None:
    page = http.get(f"/runs/{run.run}/steps/{STEP}").text
    token = page.partition('name="csrf_token" value="')[2].partition('"')[0]
    action = f"/runs/{run.run}/steps/{STEP}/doctor"
    assert http.post(action, follow_redirects=False).status_code == 403
    answer = http.post(action, data={"csrf_token": token}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run.run}/steps/{STEP}")
    assert run.get("probes").json()["items"][0]["kind"] == "doctor"
    assert "The examination is queued" in http.get(answer.headers["location"]).text


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_invalid_requests_and_reports_are_refused(run: Sender, http: httpx.Client) -> None:
    requests: list[dict[str, Any]] = [{"budget_seconds": 0}, {"max_candidates": 33}, {"max_rollouts": 5_000}, {"x": 1}]
    for fields in requests:
        assert ask(run, **fields).status_code == 422, fields
    # A probe of the doctor names no scorers, and others no budget.
    probes: list[dict[str, Any]] = [
        {"kind": "doctor", "scorers": [{"scorer": "vllm.prefill"}]},
        {"kind": "exact", "budget_seconds": 9},
    ]
    for fields in probes:
        assert http.post(f"/v1/runs/{run.run}/probes", json={"step": STEP, **fields}).status_code == 422, fields
    ask(run).raise_for_status()
    holder = working.take_lease(http, scorers=ABLE)
    changes: list[dict[str, Any]] = [
        {"tokens": 1}, {"ended": "a\x00b"}, {"ended": "a" * 2_001}, {"replays": None},
        {"findings": [{"kind": "guess"}]},
        {"not_tried": [{"variant": "v", "why": "w"}] * 4_001},
    ]  # fmt: skip
    for change in changes:
        answer = holder.put_document(found(holder) | change)
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), change


def test_examination_needs_log_probs_and_weights(sender: Sender) -> None:
    batch = replace(make_batch(4), rollout_log_probs=None, trainer_log_probs=None)
    sender.put_shard(STEP, batch).raise_for_status()
    assert "no checkpoint is announced for step 60" in ask(sender).json()["detail"]
    working.announce_checkpoint(sender, STEP)
    answer = ask(sender)
    assert problem_of(answer) == (422, "probe-not-possible")
    assert "neither rollout_log_probs nor trainer_log_probs" in answer.json()["detail"]


def test_candidates_are_those_that_led_to_the_step(run: Sender, http: httpx.Client) -> None:
    resumed = run.new_attempt("second", 50)
    resumed.put_shard(STEP, make_batch(12, seed=1)).raise_for_status()
    working.announce_checkpoint(resumed, STEP, digest(1060))
    working.announce_checkpoint(resumed, 55, digest(1055))
    ask(resumed).raise_for_status()
    job = working.take_lease(http, scorers=ABLE).lease["job"]
    # Step 59 of the first attempt was superseded.
    assert sorted(each["digest"] for each in job["candidates"]) == sorted(map(digest, (1, 20, 40, 1055)))
