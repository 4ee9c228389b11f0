"""The levers beside the rate: values, points, and the log of decisions on them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from foreshock.api.records import parse, to_json
from foreshock.api.watch import LeverReport
from foreshock.errors import InvalidArgumentError
from foreshock.learning_rate.advice import Advice, lever_in_words
from foreshock.learning_rate.decisions import (
    AdviceConflictError,
    AdviceState,
    Decision,
    Observation,
    decide,
    decide_as_operator,
    fold,
    fold_on,
    rewind,
    set_mode,
)
from foreshock.learning_rate.levers import Correction, LeverPoint, LeverState, Rollback
from foreshock.learning_rate.modes import BesideTheRate
from foreshock.learning_rate.remedy import Remedy

TIS, MIS = Correction("token_tis", "2"), Correction("sequence_mis", "2")
BACK = Rollback(41, "runs", "checkpoint-40")
ON = Remedy("correction", TIS, None, "Token TIS at 2: lag.")
COLLAPSED = Remedy("rollback", TIS, BACK, "The reward collapsed.")


def seen(step: int, remedy: Remedy | None = None, attempt: int = 1) -> Observation:
    return Observation(attempt, step, step, None, 0, remedy=remedy)


class Log:
    """A log that grows by decisions, with its state, which is always that of folding it again."""

    def __init__(self) -> None:
        self.log: list[Decision] = []
        self.state = AdviceState()

    def add(self, *decisions: Decision) -> AdviceState:
        for each in decisions:
            self.log.append(parse(Decision, json.loads(json.dumps(to_json(each)))))
            self.state = fold(self.log) if each.kind == "rewind" else fold_on(self.state, each)
        assert self.state == fold(self.log)
        assert AdviceState.from_json(json.loads(json.dumps(self.state.to_json()))) == self.state
        return self.state

    def close(self, step: int, remedy: Remedy | None) -> AdviceState:
        return self.add(*decide(self.state, seen(step, remedy, self.state.attempt)))

    def operate(
        self, step: int, kind: Any, lever: BesideTheRate, value: Any = None, revision: int | None = None
    ) -> None:
        known = seen(step, attempt=self.state.attempt)
        self.add(decide_as_operator(self.state, kind, known, "an operator's", revision, lever, value))

    def resume(self, step: int) -> AdviceState:
        return self.add(rewind(self.state, self.state.attempt + 1, step, 0))


def test_correction_is_on_from_the_first_open_step_and_decided_once() -> None:
    log = Log()
    for step in range(10, 20):
        log.close(step, ON)
    assert [(each.lever, each.effective_from_step, each.value, each.author) for each in log.log] == [
        ("correction", 11, TIS, "detector")
    ]
    assert (log.state.correction.advised(10), log.state.correction.advised(11)) == (None, TIS)
    assert log.state.correction.reason == ON.why
    # Another lever's decision says nothing about the rate.
    assert (log.state.reason, log.state.points, log.state.revision) == ("", (), 1)


def test_each_lever_is_in_shadow_until_it_is_switched_alone() -> None:
    log = Log()
    log.close(10, COLLAPSED)
    assert (log.state.correction.at(11), log.state.rollback.at(11)) == (None, None)
    log.add(set_mode(log.state, "apply", seen(10), "operator", "correction"))
    assert (log.state.correction.at(11), log.state.rollback.at(11)) == (TIS, None)
    assert (log.state.mode, log.state.rollback.advised(11)) == (None, BACK)


def test_late_data_changes_the_future_only() -> None:
    log = Log()
    log.close(10, ON)
    log.add(*decide(log.state, Observation(1, 10, 30, None, 0, remedy=COLLAPSED)))
    assert [(each.step, each.value) for each in log.state.rollback.points] == [(31, BACK)]
    log.close(40, ON)
    assert [(each.step, each.value) for each in log.state.rollback.points] == [(31, BACK), (41, None)]
    assert log.state.correction.last == TIS


def test_hold_freezes_a_lever_and_no_other() -> None:
    log = Log()
    log.operate(5, "hold", "correction")
    log.close(10, COLLAPSED)
    assert (log.state.correction.last, log.state.rollback.last, log.state.held_from_step) == (None, BACK, None)
    log.operate(11, "release", "correction")
    log.close(12, COLLAPSED)
    assert log.state.correction.points[-1].step == 13


def test_what_an_operator_sets_is_held_also_over_a_rewind() -> None:
    log = Log()
    log.close(10, ON)
    log.operate(20, "set", "correction", MIS)
    log.close(21, ON)
    assert (log.state.correction.last, log.state.correction.held_by) == (MIS, "operator")
    log.resume(15)
    assert (log.state.correction.advised(15), log.state.correction.held_by) == (MIS, "operator")
    with pytest.raises(AdviceConflictError, match="an operator has decided since"):
        log.operate(22, "release", "correction", revision=1)


@pytest.mark.parametrize(("kind", "lever"), [("release", "correction"), ("halve", "correction"), ("raise", "rollback")])
def test_operators_decision_without_effect_is_refused(kind: str, lever: BesideTheRate) -> None:
    with pytest.raises(AdviceConflictError):
        Log().operate(1, kind, lever)


def test_rewind_drops_what_was_decided_from_later_steps_and_keeps_the_mode() -> None:
    log = Log()
    log.add(set_mode(log.state, "apply", seen(-1), "trainer", "correction", MIS))
    log.close(10, ON)
    log.resume(8)
    assert (log.state.correction.points, log.state.correction.mode, log.state.correction.asked) == ((), "apply", MIS)
    assert (log.state.revision, log.state.rolled_back) == (3, ())


@pytest.mark.parametrize("resumed", [41, 42])
def test_resume_at_the_proposed_checkpoint_keeps_the_correction_and_ends_the_proposal(resumed: int) -> None:
    log = Log()
    log.close(60, COLLAPSED)
    log.resume(resumed)
    assert (log.state.correction.advised(resumed), log.state.rollback.last) == (TIS, None)
    assert log.state.rolled_back == (resumed,)
    # Another resume is none to that checkpoint.
    log.resume(30)
    assert log.state.rolled_back == (resumed,)


def test_answer_gives_each_lever_at_any_step_and_survives_a_checkpoint() -> None:
    log = Log()
    log.close(10, COLLAPSED)
    for lever in ("correction", "rollback"):
        log.add(set_mode(log.state, "apply", seen(10), "operator", lever))
    levers = {"correction": to_json(log.state.correction), "rollback": to_json(log.state.rollback)}
    answer = {"run": "run_1", "rate": {"run": "run_1", "attempt": 1, "revision": 4}, "why": "x", **levers}
    advice = Advice.from_json(json.loads(json.dumps(answer)))
    assert (advice.corrected(10), advice.corrected(11), advice.rolled_back(11)) == (None, TIS, BACK)
    assert Advice.from_json(json.loads(json.dumps(advice.to_json()))) == advice
    assert Advice.from_json({"run": "run_1", "attempt": 1, "revision": 4}).corrected(11) is None


@pytest.mark.parametrize("text", ["token_is", "token_tis:0.5", "sequence_mis:", "", "veto:1e-4"])
def test_unknown_corrections_are_refused(text: str) -> None:
    if text == "sequence_mis:":
        assert Correction.parse(text) == MIS
        return
    with pytest.raises(InvalidArgumentError):
        Correction.parse(text)
    with pytest.raises((InvalidArgumentError, TypeError)):
        parse(Correction, {"kind": text.partition(":")[0], "threshold": text.partition(":")[2] or "x"})


def test_state_of_a_newer_service_is_read_without_what_is_new() -> None:
    value = {
        **to_json(LeverState()),
        "points": [{"step": 3, "value": {"kind": "icepop", "threshold": "0.5_5", "new": 1}}],
    }
    found = LeverState.from_json({**value, "colour": "red"})
    assert found == replace(LeverState(), points=found.points)
    assert found.advised(3) == Correction("icepop", "0.5_5")


@pytest.mark.parametrize(
    ("mode", "value", "report", "expected"),
    [
        ("shadow", None, None, "No correction: the loss is as the trainer is configured."),
        ("shadow", TIS, None, "Token TIS at 2 since step 3; shown only."),
        ("apply", TIS, None, "Token TIS at 2 since step 3; not acknowledged."),
        ("apply", TIS, LeverReport(4, TIS), "Token TIS at 2 since step 3; the trainer did it at step 4."),
        ("apply", TIS, LeverReport(4, MIS), "Token TIS at 2 since step 3; the trainer has another."),
        (
            "apply",
            TIS,
            LeverReport(4, None, "set rollout_is=token."),
            "Token TIS at 2 since step 3; the trainer refused it at step 4: set rollout_is=token.",
        ),
    ],
)
def test_lever_is_one_sentence(mode: str, value: Any, report: LeverReport | None, expected: str) -> None:
    state = replace(LeverState(mode=mode), points=() if value is None else (LeverPoint(3, value),))
    assert lever_in_words("correction", state, 9, report) == expected


def test_rollback_is_told_with_its_command_and_its_hold() -> None:
    state = LeverState(points=(LeverPoint(3, replace(BACK, command="resume it")),), held_from_step=3)
    expected = "Go back to the checkpoint of step 41: resume it; held by an operator; shown only."
    assert lever_in_words("rollback", state, 9, None) == expected
    assert lever_in_words("rollback", LeverState(), 9, None) == "No rollback is proposed."
