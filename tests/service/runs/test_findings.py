"""Findings of runs over HTTP: they agree with what the lint and the attributions of the steps say, and are paged."""

from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.orm import Session

from foreshock.lint import collect_evidence
from foreshock.rollouts import RolloutBatch
from foreshock.severity import Severity
from foreshock_service.maintenance.remeasure import remeasure_step
from foreshock_service.platform.database.session import Database
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.findings import Finding, replace_findings
from foreshock_service.runs.judging import LintPart, judge_step
from foreshock_service.runs.lint import findings_of_run, store_verdict
from foreshock_service.runs.shards import close_step
from foreshock_service.watch import advance
from tests.foreshock.lint.healthy import healthy_batch
from tests.service.advancing import advance_all, paused
from tests.service.replay.attribution.replaying import replay, start
from tests.service.replay.attribution.test_environments import AMX, AVX2, KNOWN
from tests.service.replay.results.test_doctor import STEP, examined
from tests.service.sending import Sender, all_items, copied, log_probs_of, make_batch, start_run
from tests.service.statements import executed
from tests.service.working import announce_checkpoint

CHECK = "identical_log_probs"
SHARE = {"share": "share", "low": "share_low", "high": "share_high"}


def send(sender: Sender, step: int, batch: RolloutBatch, shard: int = 0, shards: int = 1) -> None:
    sender.put_shard(step, batch, shard, shards).raise_for_status()


def steps_of(run: Sender) -> list[tuple[Any, ...]]:
    """Return (name, steps, first step, newest step) of the run's findings, by name."""
    keys = ("name", "steps", "first_step", "newest_step")
    return sorted(tuple(each[key] for key in keys) for each in run.items("findings"))


def test_lint_defect_is_one_finding_with_the_evidence_of_its_newest_step(sender: Sender) -> None:
    # Out of order: what counts is the order of the steps.
    for step in (5, 4, 3, 2, 1):
        batch = healthy_batch(step)
        send(sender, step, copied(batch) if step in (2, 4) else batch)
    (finding,) = sender.items("findings")
    (warning,) = sender.get("steps/4/lint").json()["warnings"]
    assert finding.pop("changed_at_us") > 0
    assert finding == {
        "run": sender.run, "run_key": "a-run", "project": "default", "source": "lint", "name": CHECK,
        "title": warning["title"], "severity": "critical", "sentence": warning["seen"], "remedy": warning["remedy"],
        "steps": 2, "first_step": 2, "newest_step": 4, "confidence": None,
    }  # fmt: skip
    (summary,) = sender.get("lint").json()["warnings"]
    assert {name: finding[name] for name in summary} == summary


def test_healthy_run_has_no_finding_and_its_steps_close_without_a_statement_for_one(sender: Sender) -> None:
    with executed() as seen:
        for step in (1, 2):
            send(sender, step, healthy_batch(step))
        send(sender, 3, healthy_batch(3, groups=8), 0, 2)
        send(sender, 3, healthy_batch(4, groups=8), 1, 2)
    assert sender.items("findings") == []
    statements = [each.text for each in seen]
    assert any("step_lint" in each for each in statements)
    # Only the diagnosis reads them.
    assert not [each for each in statements if "findings" in each and not each.lstrip().startswith("SELECT")]
    # The control loop asks which steps are faulty, the diagnosis what they show together, and for their prompts.
    read = [each for each in statements if each.lstrip().startswith("SELECT") and "step_lint" in each]
    asked = ("step_lint.severity =", "sum(step_lint.surprisal)", "step_lint.prompts")
    assert all(any(words in each for words in asked) for each in read)


def test_cause_that_an_attribution_names_is_a_finding_with_its_share(http: httpx.Client, app: FastAPI) -> None:
    batch = make_batch(40, attributes=KNOWN)
    scores = dict(zip(("vllm.prefill", "torch.trainer"), log_probs_of(batch), strict=True))
    run = start(http, batch, 1, 2)
    for step in (2, 1):
        replay(run, scores, batch, AVX2, step)
    read = run.get("steps/2/attribution").json()
    (conclusion,) = [each for each in read["conclusions"] if each["names_cause"]]
    (link,) = [each for each in read["links"] if each["name"] == conclusion["link"]]
    (finding,) = run.items("findings", source="attribution")
    assert (finding["name"], finding["sentence"]) == ("torch.trainer/vllm.prefill", conclusion["sentence"])
    assert finding["title"] == link["cause"].partition(":")[0]
    assert (finding["severity"], finding["remedy"]) == ("info", None)
    assert (finding["steps"], finding["first_step"], finding["newest_step"]) == (2, 1, 2)
    assert finding["confidence"] == {name: link[key] for name, key in SHARE.items()}


def test_attribution_of_another_step_can_make_a_cause_a_finding(http: httpx.Client, app: FastAPI) -> None:
    batch = make_batch(40, attributes=KNOWN)
    behaviour, target = log_probs_of(batch)
    run = start(http, batch, 1, 2)
    replay(run, {"vllm.prefill": target, "torch.trainer": target}, batch, AMX, 2)
    assert run.items("findings", source="attribution") == []
    # The replay of step 1, in the same environment, is equal bit for bit: the environment does not explain step 2.
    replay(run, {"vllm.prefill": behaviour, "torch.trainer": behaviour}, batch, AMX, 1)
    named = {
        (conclusion["link"], step, conclusion["sentence"])
        for step in (1, 2)
        for conclusion in run.get(f"steps/{step}/attribution").json()["conclusions"]
        if conclusion["names_cause"]
    }
    assert ("vllm.prefill/rollout", 2) in {(link, step) for link, step, _ in named}
    assert {
        (each["name"], each["newest_step"], each["sentence"]) for each in run.items("findings", source="attribution")
    } == named


def test_causes_of_the_doctor_are_findings_and_causes_of_the_diagnosis(sender: Sender, app: FastAPI) -> None:
    send(sender, STEP, make_batch(12))
    for step in (1, 40, 59, STEP):
        announce_checkpoint(sender, step)
    examined(sender)
    (finding,) = sender.items("findings", source="doctor")
    assert finding["name"] == "other_weights/rollout"
    assert finding["title"].endswith("are those of the weights step 1")
    assert (finding["confidence"]["share"], finding["newest_step"]) == (0.998, STEP)
    causes = sender.get("diagnosis").raise_for_status().json()["causes"]
    assert (causes[0]["source"], causes[0]["certainty"]) == ("doctor", "shown")
    assert causes[0]["sentence"].count("the weights step 1") == 1
    assert f"are those of the weights step 1 (step {STEP}): explains 99.8 %" in causes[0]["sentence"]
    assert causes[0]["what_to_do"] == "Verify the weight sync."


def test_steps_that_a_resume_supersedes_are_not_counted(sender: Sender, app: FastAPI) -> None:
    for step in range(1, 5):
        send(sender, step, copied(healthy_batch(step)))
    before = sender.items("findings")[0]
    assert steps_of(sender) == [(CHECK, 4, 1, 4)]
    resumed = sender.new_attempt("again", 3)
    assert steps_of(sender) == [(CHECK, 2, 1, 2)]
    assert sender.items("findings")[0]["sentence"] == sender.get("steps/2/lint").json()["warnings"][0]["seen"]
    assert sender.items("findings")[0]["changed_at_us"] > before["changed_at_us"]
    # A late step of the older attempt is superseded as well; one of the new attempt is not.
    send(sender, 5, copied(healthy_batch(5)))
    send(resumed, 3, copied(healthy_batch(3)))
    assert steps_of(sender) == [(CHECK, 3, 1, 3)]
    sender.new_attempt("from the start", 0)
    assert sender.items("findings") == []


def test_late_shard_takes_a_finding_away(sender: Sender, app: FastAPI) -> None:
    send(sender, 1, copied(healthy_batch(1)))
    send(sender, 2, copied(healthy_batch(2, groups=1)), 0, 2)
    assert close_step(app.state.context, StepKey(sender.run, 1, 2))
    assert steps_of(sender) == [(CHECK, 2, 1, 2)]
    # Most of the step is healthy, so that its verdict is another one.
    send(sender, 2, healthy_batch(3, groups=24), 1, 2)
    assert CHECK not in [each["name"] for each in sender.get("steps/2/lint").json()["warnings"]]
    assert (CHECK, 1, 1, 1) in steps_of(sender)
    summary = sender.get("lint").json()["warnings"]
    assert steps_of(sender) == sorted((w["name"], w["steps"], w["first_step"], w["newest_step"]) for w in summary)


def test_late_shard_with_the_same_defect_is_counted_once(sender: Sender, app: FastAPI) -> None:
    send(sender, 2, copied(healthy_batch(2)), 0, 2)
    assert close_step(app.state.context, StepKey(sender.run, 1, 2))
    (before,) = sender.items("findings")
    send(sender, 2, copied(healthy_batch(3)), 1, 2)
    (after,) = sender.items("findings")
    assert (after["steps"], after["changed_at_us"]) == (1, before["changed_at_us"])
    assert after["sentence"] == sender.get("steps/2/lint").json()["warnings"][0]["seen"] != before["sentence"]


def store_wrong_verdict(database: Database, run: Sender, step: int) -> None:
    """Store what a release with a wrong check concludes from a healthy step."""
    shard = LintPart.of(collect_evidence(copied(healthy_batch(step))))
    verdict = judge_step(step, 1, [shard])
    assert verdict is not None
    database.write(lambda session: store_verdict(session, StepKey(run.run, 1, step), verdict, again=True))


def test_measuring_again_takes_a_finding_away(sender: Sender, app: FastAPI) -> None:
    for step in (1, 2):
        send(sender, step, healthy_batch(step))
        store_wrong_verdict(app.state.context.database, sender, step)
    assert steps_of(sender) == [(CHECK, 2, 1, 2)]
    assert remeasure_step(app.state.context, StepKey(sender.run, 1, 2)) is None
    assert steps_of(sender) == [(CHECK, 1, 1, 1)]
    assert remeasure_step(app.state.context, StepKey(sender.run, 1, 1)) is None
    assert sender.items("findings") == []


def test_step_closed_while_findings_are_read_is_kept(
    sender: Sender, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        send(sender, step, copied(healthy_batch(step)))
    reads = 0

    def read_late(session: Session, run_id: str) -> Sequence[Finding]:
        nonlocal reads
        found = findings_of_run(session, run_id)
        reads += 1
        if reads == 1:
            session.rollback()
            send(resumed, 2, copied(healthy_batch(7)))
        return found

    with monkeypatch.context() as patch, paused(app.state.context.database):
        patch.setitem(cast(dict[str, Any], advance._FINDINGS), "lint", read_late)
        resumed = sender.new_attempt("again", 2)
        advance_all(app.state.advancing)
    assert (reads, steps_of(sender)) == (2, [(CHECK, 2, 1, 2)])


def store(database: Database, run: Sender, names: Sequence[str], severity: Severity = "warning") -> None:
    """Store findings of a run, as the lint would."""
    found = [Finding(name, severity, f"title of {name}", "seen", "do", None, 3, 1, 9) for name in names]
    database.write(lambda session: replace_findings(session, run.run, "lint", found))


def test_findings_of_many_runs_are_paged_newest_first_and_filtered(http: httpx.Client, database: Database) -> None:
    runs = [start_run(http, f"run-{number}", project=("ours", "theirs")[number % 2]) for number in range(12)]
    for number, run in enumerate(runs):
        names = ["mean_ratio", CHECK, "pad_id_sampled"][: 1 + number % 3]
        store(database, run, names, ("warning", "critical")[number % 2])
    everything = all_items(http, "/v1/findings")
    assert len(everything) == 24
    order = [(each["changed_at_us"], each["run"], each["source"], each["name"]) for each in everything]
    assert order == sorted(order, reverse=True)
    assert {each["run"]: each["run_key"] for each in everything} == {
        run.run: f"run-{number}" for number, run in enumerate(runs)
    }
    for limit in (1, 5, 24):
        assert all_items(http, "/v1/findings", limit) == everything
    of_one = [each for each in everything if each["run"] == runs[2].run]
    assert runs[2].items("findings", limit=2) == of_one
    for query, count in (
        ({"project": "ours"}, 12),
        ({"project": "nobody"}, 0),
        ({"name": "mean_ratio"}, 12),
        ({"name": ["mean_ratio", "pad_id_sampled"]}, 16),
        ({"severity": "critical"}, 12),
        ({"severity": ["critical", "warning"], "source": "lint", "project": "theirs"}, 12),
        ({"source": "attribution"}, 0),
    ):
        assert len(all_items(http, "/v1/findings", 7, **query)) == count, query
    http.delete(f"/v1/runs/{runs[2].run}").raise_for_status()
    assert len(all_items(http, "/v1/findings", 7)) == 21
    assert http.get(f"/v1/runs/{runs[2].run}/findings").status_code == 410


def test_unchanged_findings_that_are_read_anew_keep_their_time(sender: Sender, database: Database) -> None:
    store(database, sender, ["mean_ratio", CHECK])
    before = {each["name"]: each["changed_at_us"] for each in sender.items("findings")}
    store(database, sender, ["mean_ratio", "pad_id_sampled"])
    after = {each["name"]: each["changed_at_us"] for each in sender.items("findings")}
    assert after.keys() == {"mean_ratio", "pad_id_sampled"}
    assert after["mean_ratio"] == before["mean_ratio"] < after["pad_id_sampled"]
