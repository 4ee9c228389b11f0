"""Findings of runs over HTTP: they agree with what the lint and the attributions of the steps say, and are paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from foreshock.rollouts import RolloutBatch
from foreshock.severity import Severity
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.database.session import Database
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.findings import FindingOfStep, FindingOfSteps, replace_findings
from foreshock_service.runs.judging import LintPart, judge_step, lint_shard
from foreshock_service.runs.lint import findings_of_run, store_verdict
from foreshock_service.runs.shards import close_step
from foreshock_service.watch import advance
from tests.foreshock.lint.healthy import healthy_batch
from tests.service.advancing import advance_all, paused
from tests.service.replay.attribution.replaying import replay, start
from tests.service.replay.attribution.test_environments import AMX, AVX2, KNOWN
from tests.service.replay.results.test_doctor import STEP, examined
from tests.service.sending import Sender, make_batch, start_run
from tests.service.working import announce_checkpoint

CHECK = "identical_log_probs"


def copied(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch of a trainer in bypass mode."""
    assert batch.rollout_log_probs is not None
    return replace(batch, trainer_log_probs=batch.rollout_log_probs.copy())


def send(sender: Sender, step: int, batch: RolloutBatch, shard: int = 0, shards: int = 1) -> None:
    sender.put_shard(step, batch, shard, shards).raise_for_status()


def findings(run: Sender, **query: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = run.get("findings", **query).raise_for_status().json()["items"]
    return items


def steps_of(run: Sender) -> list[tuple[str, int, int, int]]:
    """Return (name, steps, first step, newest step) of the run's findings, by name."""
    return sorted((each["name"], each["steps"], each["first_step"], each["newest_step"]) for each in findings(run))


def test_lint_defect_is_one_finding_with_the_evidence_of_its_newest_step(http: httpx.Client) -> None:
    run = start_run(http)
    # Out of order: what counts is the order of the steps.
    for step in (5, 4, 3, 2, 1):
        batch = healthy_batch(step)
        send(run, step, copied(batch) if step in (2, 4) else batch)
    (finding,) = findings(run)
    (warning,) = run.get("steps/4/lint").json()["warnings"]
    assert finding.pop("changed_at_us") > 0
    assert finding == {
        "run": run.run,
        "run_key": "a-run",
        "project": "default",
        "source": "lint",
        "name": CHECK,
        "title": warning["title"],
        "severity": "critical",
        "sentence": warning["seen"],
        "remedy": warning["remedy"],
        "steps": 2,
        "first_step": 2,
        "newest_step": 4,
        "confidence": None,
    }
    (summary,) = run.get("lint").json()["warnings"]
    assert {name: finding[name] for name in summary} == summary


def test_healthy_run_has_no_finding_and_its_steps_close_without_a_statement_for_one(http: httpx.Client) -> None:
    run = start_run(http)
    statements: list[str] = []

    def note(*call: Any) -> None:
        statements.append(call[2])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        for step in (1, 2):
            send(run, step, healthy_batch(step))
        send(run, 3, healthy_batch(3, groups=8), 0, 2)
        send(run, 3, healthy_batch(4, groups=8), 1, 2)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert findings(run) == []
    assert any("step_lint" in each for each in statements)
    # Only the diagnosis reads them.
    assert not [each for each in statements if "findings" in each and not each.lstrip().startswith("SELECT")]
    # The control loop asks which steps are faulty.
    read = [each for each in statements if each.lstrip().startswith("SELECT") and "step_lint" in each]
    assert all("step_lint.severity =" in each for each in read)


def test_cause_that_an_attribution_names_is_a_finding_with_its_share(http: httpx.Client, app: FastAPI) -> None:
    batch = make_batch(40, attributes=KNOWN)
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    run = start(http, batch, 1, 2)
    for step in (2, 1):
        replay(
            run, {"vllm.prefill": batch.rollout_log_probs, "torch.trainer": batch.trainer_log_probs}, batch, AVX2, step
        )
    read = run.get("steps/2/attribution").json()
    (conclusion,) = [each for each in read["conclusions"] if each["names_cause"]]
    (link,) = [each for each in read["links"] if each["name"] == conclusion["link"]]
    (finding,) = findings(run, source="attribution")
    assert (finding["name"], finding["sentence"]) == ("torch.trainer/vllm.prefill", conclusion["sentence"])
    assert finding["title"] == link["cause"].partition(":")[0]
    assert (finding["severity"], finding["remedy"]) == ("info", None)
    assert (finding["steps"], finding["first_step"], finding["newest_step"]) == (2, 1, 2)
    assert finding["confidence"] == {
        "share": link["share"],
        "low": link["share_low"],
        "high": link["share_high"],
    }


def test_attribution_of_another_step_can_make_a_cause_a_finding(http: httpx.Client, app: FastAPI) -> None:
    batch = make_batch(40, attributes=KNOWN)
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    run = start(http, batch, 1, 2)
    replay(run, {"vllm.prefill": batch.trainer_log_probs, "torch.trainer": batch.trainer_log_probs}, batch, AMX, 2)
    assert findings(run, source="attribution") == []
    # The replay of step 1, in the same environment, is equal bit for bit: the environment does not explain step 2.
    replay(run, {"vllm.prefill": batch.rollout_log_probs, "torch.trainer": batch.rollout_log_probs}, batch, AMX, 1)
    named = {
        (conclusion["link"], step, conclusion["sentence"])
        for step in (1, 2)
        for conclusion in run.get(f"steps/{step}/attribution").json()["conclusions"]
        if conclusion["names_cause"]
    }
    assert ("vllm.prefill/rollout", 2) in {(link, step) for link, step, _ in named}
    assert {
        (each["name"], each["newest_step"], each["sentence"]) for each in findings(run, source="attribution")
    } == named


def test_causes_of_the_doctor_are_findings_and_causes_of_the_diagnosis(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http)
    send(run, STEP, make_batch(12))
    for step in (1, 40, 59, STEP):
        announce_checkpoint(run, step)
    examined(run)
    (finding,) = findings(run, source="doctor")
    assert finding["name"] == "other_weights/rollout"
    assert finding["title"].endswith("are those of the weights step 1")
    assert (finding["confidence"]["share"], finding["newest_step"]) == (0.998, STEP)
    causes = run.get("diagnosis").raise_for_status().json()["causes"]
    assert (causes[0]["source"], causes[0]["certainty"]) == ("doctor", "shown")
    assert causes[0]["sentence"].count("the weights step 1") == 1
    assert f"are those of the weights step 1 (step {STEP}): explains 99.8 %" in causes[0]["sentence"]
    assert causes[0]["what_to_do"] == "Verify the weight sync."


def test_steps_that_a_resume_supersedes_are_not_counted(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http)
    for step in range(1, 5):
        send(run, step, copied(healthy_batch(step)))
    before = findings(run)[0]
    assert steps_of(run) == [(CHECK, 4, 1, 4)]
    resumed = run.new_attempt("again", 3)
    assert steps_of(run) == [(CHECK, 2, 1, 2)]
    assert findings(run)[0]["sentence"] == run.get("steps/2/lint").json()["warnings"][0]["seen"]
    assert findings(run)[0]["changed_at_us"] > before["changed_at_us"]
    # A late step of the older attempt is superseded as well; one of the new attempt is not.
    send(run, 5, copied(healthy_batch(5)))
    send(resumed, 3, copied(healthy_batch(3)))
    assert steps_of(run) == [(CHECK, 3, 1, 3)]
    run.new_attempt("from the start", 0)
    assert findings(run) == []


def test_late_shard_takes_a_finding_away(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http)
    send(run, 1, copied(healthy_batch(1)))
    send(run, 2, copied(healthy_batch(2, groups=1)), 0, 2)
    assert close_step(app.state.context, StepKey(run.run, 1, 2), grace_us=-1)
    assert steps_of(run) == [(CHECK, 2, 1, 2)]
    # Most of the step is healthy, so that its verdict is another one.
    send(run, 2, healthy_batch(3, groups=24), 1, 2)
    assert CHECK not in [each["name"] for each in run.get("steps/2/lint").json()["warnings"]]
    assert (CHECK, 1, 1, 1) in steps_of(run)
    summary = run.get("lint").json()["warnings"]
    assert steps_of(run) == sorted((w["name"], w["steps"], w["first_step"], w["newest_step"]) for w in summary)


def test_late_shard_with_the_same_defect_is_counted_once(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http)
    send(run, 2, copied(healthy_batch(2)), 0, 2)
    assert close_step(app.state.context, StepKey(run.run, 1, 2), grace_us=-1)
    (before,) = findings(run)
    send(run, 2, copied(healthy_batch(3)), 1, 2)
    (after,) = findings(run)
    assert (after["steps"], after["changed_at_us"]) == (1, before["changed_at_us"])
    assert after["sentence"] == run.get("steps/2/lint").json()["warnings"][0]["seen"] != before["sentence"]


def store_wrong_verdict(database: Database, run: Sender, step: int) -> None:
    """Store what a release with a wrong check concludes from a healthy step."""
    shard = LintPart.of(lint_shard(copied(healthy_batch(step))))
    verdict = judge_step(step, 1, [shard])
    assert verdict is not None
    database.write(lambda session: store_verdict(session, StepKey(run.run, 1, step), verdict, again=True))


def test_measuring_again_takes_a_finding_away(http: httpx.Client, app: FastAPI, database: Database) -> None:
    run = start_run(http)
    for step in (1, 2):
        send(run, step, healthy_batch(step))
        store_wrong_verdict(database, run, step)
    assert steps_of(run) == [(CHECK, 2, 1, 2)]
    assert remeasure_step(app.state.context, StepKey(run.run, 1, 2)).left is None
    assert steps_of(run) == [(CHECK, 1, 1, 1)]
    assert remeasure_step(app.state.context, StepKey(run.run, 1, 1)).left is None
    assert findings(run) == []


def test_step_that_closes_while_findings_are_read_anew_is_not_lost(
    http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(http)
    for step in (1, 2):
        send(run, step, copied(healthy_batch(step)))
    reads = 0

    def read_late(session: Session, run_id: str) -> Sequence[FindingOfSteps]:
        nonlocal reads
        found = findings_of_run(session, run_id)
        reads += 1
        if reads == 1:
            session.rollback()
            send(resumed, 2, copied(healthy_batch(7)))
        return found

    with monkeypatch.context() as patch, paused(app.state.context.database):
        patch.setitem(cast(dict[str, Any], advance._FINDINGS), "lint", read_late)
        resumed = run.new_attempt("again", 2)
        advance_all(app.state.advancing)
    assert (reads, steps_of(run)) == (2, [(CHECK, 2, 1, 2)])


def test_run_whose_findings_cannot_be_read_does_not_keep_those_of_others(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [start_run(http, key) for key in ("a", "b")]
    for run in runs:
        send(run, 1, copied(healthy_batch(1)))

    def fail_for_one(session: Session, run_id: str) -> Sequence[FindingOfSteps]:
        if run_id == min(run.run for run in runs):
            raise RuntimeError("unreadable")
        return findings_of_run(session, run_id)

    monkeypatch.setitem(cast(dict[str, Any], advance._FINDINGS), "lint", fail_for_one)
    for run in runs:
        run.new_attempt("again", 0)
    assert [len(findings(run)) for run in sorted(runs, key=lambda run: run.run)] == [1, 0]


def store(database: Database, run: Sender, names: Sequence[str], severity: Severity = "warning") -> None:
    """Store findings of a run, as the lint would."""
    found = [FindingOfSteps(FindingOfStep(name, severity, f"title of {name}", "seen", "do"), 3, 1, 9) for name in names]
    database.write(lambda session: replace_findings(session, run.run, "lint", found))


def pages(http: httpx.Client, path: str, limit: int, **query: Any) -> list[dict[str, Any]]:
    """Return the items of all pages."""
    items: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = http.get(path, params={"limit": limit, **query, **cursor}).raise_for_status().json()
        assert len(page["items"]) <= limit
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        cursor = {"cursor": page["next_cursor"]}


def test_findings_of_many_runs_are_paged_newest_first_and_filtered(http: httpx.Client, database: Database) -> None:
    runs = [start_run(http, f"run-{number}", project=("ours", "theirs")[number % 2]) for number in range(12)]
    for number, run in enumerate(runs):
        store(
            database,
            run,
            ["mean_ratio", CHECK, "pad_id_sampled"][: 1 + number % 3],
            ("warning", "critical")[number % 2],
        )
    everything = http.get("/v1/findings", params={"limit": 500}).raise_for_status().json()["items"]
    assert len(everything) == 24
    order = [(each["changed_at_us"], each["run"], each["source"], each["name"]) for each in everything]
    assert order == sorted(order, reverse=True)
    assert {each["run"]: each["run_key"] for each in everything} == {
        run.run: f"run-{number}" for number, run in enumerate(runs)
    }
    for limit in (1, 5, 24):
        assert pages(http, "/v1/findings", limit) == everything
    of_one = [each for each in everything if each["run"] == runs[2].run]
    assert pages(http, f"/v1/runs/{runs[2].run}/findings", 2) == of_one
    for query, count in (
        ({"project": "ours"}, 12),
        ({"project": "nobody"}, 0),
        ({"name": "mean_ratio"}, 12),
        ({"name": ["mean_ratio", "pad_id_sampled"]}, 16),
        ({"severity": "critical"}, 12),
        ({"severity": ["critical", "warning"], "source": "lint", "project": "theirs"}, 12),
        ({"source": "attribution"}, 0),
    ):
        assert len(pages(http, "/v1/findings", 7, **query)) == count, query
    http.delete(f"/v1/runs/{runs[2].run}").raise_for_status()
    assert len(pages(http, "/v1/findings", 7)) == 21
    assert http.get(f"/v1/runs/{runs[2].run}/findings").status_code == 410


def test_unchanged_findings_that_are_read_anew_keep_their_time(http: httpx.Client, database: Database) -> None:
    run = start_run(http)
    store(database, run, ["mean_ratio", CHECK])
    before = {each["name"]: each["changed_at_us"] for each in findings(run)}
    store(database, run, ["mean_ratio", "pad_id_sampled"])
    after = {each["name"]: each["changed_at_us"] for each in findings(run)}
    assert after.keys() == {"mean_ratio", "pad_id_sampled"}
    assert after["mean_ratio"] == before["mean_ratio"] < after["pad_id_sampled"]
