"""Rules of a run over HTTP: shown, changed from a step on; the learning rate never rises by a change."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
from fastapi import FastAPI

from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.rule_files import parse_rules
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.schedule import ScheduleSettings
from tests.service.watch.recorded import K3, LENGTH, SURGE, SURGE_STEPS, RecordedRun

HEAD = "version = 1\n"
QUIET = HEAD + "[rules.mismatch_runaway]\nenabled = false\n"


@pytest.fixture
def run(app: FastAPI) -> RecordedRun:
    return RecordedRun(app.state.context.database).begin()


def put(http: httpx.Client, run: RecordedRun, toml: str) -> httpx.Response:
    return http.put(f"/v1/runs/{run.run}/rules", json={"toml": toml})


def fired(run: RecordedRun, rule: str) -> list[tuple[int, str]]:
    return [(alert.step, alert.state) for alert in run.alerts() if alert.rule == rule]


def test_default_rules_are_shown_with_their_sources_and_as_toml(http: httpx.Client) -> None:
    shown = http.get("/v1/rules", params={"model_kind": "moe"}).raise_for_status().json()
    assert [rule["name"] for rule in shown["rules"]] == [rule.name for rule in default_rules("moe")]
    assert all(rule["source"] for rule in shown["rules"])
    assert parse_rules(shown["toml"]).applied_to(default_rules("moe")) == default_rules("moe")
    assert http.get("/v1/rules", params={"model_kind": "huge"}).status_code == 422


def test_changed_rule_holds_from_its_step_on(http: httpx.Client, run: RecordedRun) -> None:
    run.close_all({K3: [5e-4] * 40}, range(1, 41))
    assert run.alerts() == []
    strict = HEAD + "effective_from_step = 21\n[rules.mismatch_warning]\nabsolute = 5e-5\n"
    version = put(http, run, strict).raise_for_status().json()
    assert (version["version"], version["effective_from_step"]) == (1, 21)
    # Ten times the threshold: five steps from step 21 on.
    assert fired(run, "mismatch_warning") == [(25, "open")]
    shown = http.get(f"/v1/runs/{run.run}/rules").raise_for_status().json()
    (rule,) = [each for each in shown["rules"] if each["name"] == "mismatch_warning"]
    assert (rule["absolute"], len(shown["versions"])) == (5e-5, 1)
    before = http.get(f"/v1/runs/{run.run}/rules", params={"step": 20}).raise_for_status().json()
    assert before["rules"] == http.get("/v1/rules").json()["rules"]
    # A newer version replaces the old one from its own first step on.
    put(http, run, HEAD + "effective_from_step = 31\n").raise_for_status()
    (alert,) = [alert for alert in run.alerts() if alert.rule == "mismatch_warning"]
    assert (alert.step, alert.state, alert.cleared_step) == (25, "resolved", 35)


def test_change_is_the_same_whenever_it_comes(http: httpx.Client, run: RecordedRun) -> None:
    other = RecordedRun(run.database).begin("other")
    toml = HEAD + "effective_from_step = 10\n[rules.own]\nkey = 'scalars:x'\nabsolute = 1.0\n"
    toml += "severity = 'critical'\nwhy = 'w'\nwhat_to_do = 'd'\n"
    put(http, run, toml).raise_for_status()
    run.close_all({K3: [5e-4] * 12 + [0.3] * 10}, range(1, 23))
    other.close_all({K3: [5e-4] * 12 + [0.3] * 10}, range(1, 23))
    put(http, other, toml).raise_for_status()
    assert run.newest_state() == other.newest_state()
    for each in (run, other):
        for step in range(8, 20):
            each.log(step, {"x": 2.0})
        assert fired(each, "own") == [(14, "open")]


def test_change_of_rules_never_raises_the_learning_rate(http: httpx.Client, run: RecordedRun) -> None:
    run.close_all({K3: [5e-4] * 12 + [0.3] * 10}, range(1, 23))
    lowered = run.advice().scale(60)
    assert lowered < 0.5
    scales = []
    for toml in (QUIET, HEAD, QUIET, HEAD + "[rules.mismatch_runaway]\nrelative = 2.0\n"):
        put(http, run, toml).raise_for_status()
        scales.append(run.advice().scale(60))
    assert all(later <= earlier for earlier, later in pairwise([lowered, *scales]))
    assert fired(run, "mismatch_runaway")[0][1] == "open"


def test_rule_that_holds_freezes_the_learning_rate_while_it_fires(http: httpx.Client, run: RecordedRun) -> None:
    put(http, run, HEAD + "[rules.mismatch_runaway]\neffect = 'hold'\n[loop]\nenabled = false\n").raise_for_status()
    run.close_all({K3: [5e-4] * 12 + [0.3] * 10}, range(1, 23))
    assert run.decisions() == ["hold"]
    assert run.advice().held_from_step == 18
    run.close_all({K3: [5e-4] * 5}, range(23, 28))
    assert run.decisions() == ["hold", "release"]
    assert run.advice().scale(100) == 1.0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("version = 2", "version must be 1"),
        ("[[", "not valid TOML"),
        (HEAD + "[rules.mismatch_ris]\nrelative = 3.0\n", "did you mean 'mismatch_rise'"),
        (HEAD + "[rules.mismatch_rise]\nrelativ = 3.0\n", "did you mean 'relative'"),
        (HEAD + "[rules.stale_run]\nenabled = false\n", "delivery of rollouts"),
        (HEAD + "[rules.length_surge]\nenabled = false\n", "is a detector"),
        (HEAD + "[rules.mismatch_warning]\neffect = 'halve'\n", "an absolute crossing alone never moves"),
    ],
)
def test_invalid_file_is_refused_and_changes_nothing(
    http: httpx.Client, run: RecordedRun, toml: str, message: str
) -> None:
    answer = put(http, run, toml)
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:foreshock:problem:rules-invalid")
    assert message in answer.json()["detail"]
    assert http.get(f"/v1/runs/{run.run}/rules").json()["versions"] == []


def test_schedule_of_a_surge_is_the_one_of_its_step(http: httpx.Client, app: FastAPI) -> None:
    run = RecordedRun(app.state.context.database).begin(advice_mode="apply")
    file = HEAD + "effective_from_step = 50\n[schedule]\nmultiplier = 2.0\nfactor = 0.8\nfloor = 0.4\n"
    put(http, run, file).raise_for_status()
    run.close_all({LENGTH: SURGE}, SURGE_STEPS)
    shown = http.get(f"/v1/runs/{run.run}/rules", params={"step": 60}).raise_for_status().json()
    assert parse_rules(shown["toml"]).schedule == ScheduleSettings(2.0, 0.8, 0.4)
    address = f"/v1/runs/{run.run}/lr-advice"
    answers = {step: http.get(address, params={"step": step}).json() for step in (119, 221, 222, 444, 2000)}
    assert [each["scale"] for each in answers.values()] == pytest.approx([1.0, 1.0, 0.8, 0.64, 0.4])
    known = Advice.from_json(answers[119])
    assert [known.scale(step) for step in answers] == [each["scale"] for each in answers.values()]
    # Another file keeps the schedule that has begun; without the surge the past halvings stay as deep.
    put(http, run, HEAD + "[schedule]\nfloor = 0.9\n").raise_for_status()
    run.close_all({LENGTH: [SURGE[0]]}, [260])
    assert http.get(address, params={"step": 500}).json()["scale"] == pytest.approx(0.64)
    run.close_all({LENGTH: [SURGE[0]] * 40}, range(106, 146))
    retracted = http.get(address, params={"step": 500}).json()
    assert (retracted["schedule"], retracted["halvings"], retracted["factor"]) == (None, [222], 0.8)
    assert retracted["scale"] == 0.8
    assert Advice.from_json(retracted).scale(500) == 0.8
