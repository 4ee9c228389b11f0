"""Findings over the steps of a run as causes: their dates, their certainty, and which of them are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreshock.diagnosis.findings import LAG, SAMPLING, PastFinding, tell_findings
from foreshock.lint import CHECKS

NEWEST = range(21, 61)
SHIFTED = PastFinding("lint", "shifted_log_probs", "critical", "they are shifted", "By one.", "Mend it.", 60, 1, 60)
PROBED = PastFinding("attribution", "numerics", "warning", "All of it is numerics", "It is.", "", 1, 40, 40)


@pytest.mark.parametrize(
    ("steps", "first", "newest", "when"),
    [
        (60, 1, 60, "in every step since 1"),
        (58, 1, 58, "in every step from 1 to 58"),
        (1, 60, 60, "step 60"),
        (30, 1, 60, "in 30 of 60 steps since 1"),
        (20, 1, 58, "in 20 of 60 steps since 1, last at 58"),
    ],
)
def test_a_finding_is_dated(steps: int, first: int, newest: int, when: str) -> None:
    found = replace(SHIFTED, steps=steps, first_step=first, newest_step=newest)
    (cause,) = tell_findings([found], NEWEST, lambda first: 61 - first).causes
    assert cause.sentence == f"they are shifted ({when}): By one."
    assert (cause.source, cause.certainty, cause.evidence["first_step"]) == ("lint", "shown", first)


def test_what_the_newest_steps_no_longer_show_is_over_unless_a_probe_found_it() -> None:
    told = tell_findings([replace(SHIFTED, newest_step=50), PROBED], NEWEST, lambda first: 60)
    assert [(each.name, each.source) for each in told.causes] == [("numerics", "probe")]


@pytest.mark.parametrize(("steps", "first", "is_told"), [(4, 3, True), (4, 33, False), (2, 3, False)])
def test_what_recurs_now_and_then_is_not_over_after_a_few_steps(steps: int, first: int, is_told: bool) -> None:
    found = replace(SHIFTED, name="advantage_outlier", steps=steps, first_step=first, newest_step=45)
    assert bool(tell_findings([found], NEWEST, lambda first: 60).causes) == is_told
    # What makes the mismatch is over if the newest steps do not show it.
    assert not tell_findings([replace(found, name=SHIFTED.name)], NEWEST, lambda first: 60).causes


@pytest.mark.parametrize(("steps", "is_told"), [(2, False), (14, False), (16, True)])
def test_an_info_is_told_of_many_steps(steps: int, is_told: bool) -> None:
    info = replace(SHIFTED, severity="info", steps=steps)
    assert bool(tell_findings([info], NEWEST, lambda first: 60).causes) == is_told


def test_a_fault_that_makes_no_mismatch_gives_its_share_of_the_steps() -> None:
    part = replace(SHIFTED, name="empty_responses", title="responses are empty", steps=20)
    assert not CHECKS["empty_responses"].explains
    (cause,) = tell_findings([part], NEWEST, lambda first: 60).causes
    assert cause.title == "responses are empty in 20 of 60 steps"
    (cause,) = tell_findings([replace(SHIFTED, steps=20)], NEWEST, lambda first: 60).causes
    assert cause.title == "they are shifted"


@pytest.mark.parametrize(("steps", "title"), [(14, "they are shifted in 14 of 60 steps"), (15, "they are shifted")])
def test_what_makes_a_mismatch_gives_its_share_of_the_steps_if_it_is_seldom_seen(steps: int, title: str) -> None:
    (cause,) = tell_findings([replace(SHIFTED, steps=steps)], NEWEST, lambda first: 60).causes
    assert cause.title == title


def test_a_fault_that_is_often_there_by_chance_must_last() -> None:
    name = next(name for name, each in CHECKS.items() if each.lasting)
    for steps, is_told in ((20, False), (58, True)):
        found = replace(SHIFTED, name=name, steps=steps)
        assert bool(tell_findings([found], NEWEST, lambda first: 60).causes) == is_told


def test_what_is_missing_is_no_cause() -> None:
    missing = [replace(SHIFTED, name=name, severity="info") for name in (SAMPLING, LAG)]
    told = tell_findings(missing, NEWEST, lambda first: 60)
    assert told.causes == ()
    assert [each.sentence for each in (*told.undeclared, *told.unlogged)] == ["they are shifted: By one"] * 2


def test_causes_come_by_their_gravity_and_an_auxiliary_column_has_no_headline() -> None:
    auxiliary = next(name for name, each in CHECKS.items() if each.auxiliary)
    found = [replace(SHIFTED, name=auxiliary, severity="warning"), SHIFTED]
    causes = tell_findings(found, NEWEST, lambda first: 60).causes
    assert [(each.name, each.title) for each in causes] == [(SHIFTED.name, SHIFTED.title), (auxiliary, "")]


def test_the_doctors_sentence_says_its_title_once() -> None:
    doctor = replace(
        PROBED, source="doctor", title="π is at temperature 1", sentence="Π is at temperature 1: so it is."
    )
    (cause,) = tell_findings([doctor], NEWEST, lambda first: 60).causes
    assert cause.sentence == "π is at temperature 1 (step 40): so it is."
