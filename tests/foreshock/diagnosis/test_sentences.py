"""Sentences say no more than what was measured, and in the reader's words."""

from __future__ import annotations

import pytest

from foreshock.diagnosis.attribution import conclude_links
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.detectors import WATCHING_REASONS
from foreshock.diagnosis.mismatch_order import mismatch_at_fall, order_in_words
from foreshock.lint import CHECKS
from tests.foreshock.diagnosis.curves import LENGTH, closed_steps, noisy, surge_curve, watch
from tests.foreshock.diagnosis.evidence import attributed, evidence_of


def test_a_surge_of_the_lengths_foretells_nothing() -> None:
    _, events = watch(closed_steps({LENGTH: noisy(surge_curve(110, 5.0))}))
    (surge,) = [each for each in events if each.rule == "length_surge"]
    assert surge.why == "The mean response length has doubled steeply: a length surge."
    texts = [each.why + each.what_to_do for each in default_rules()]
    assert not any("precede" in each for each in texts)


def test_texts_of_rules_say_what_to_do_and_name_the_command() -> None:
    by_name = {each.name: each for each in default_rules()}
    assert by_name["mismatch_warning"].what_to_do == (
        "Save a checkpoint, then `foreshock probe RUN STEP` names the part that differs."
    )
    assert by_name["mismatch_baseline_critical"].what_to_do.startswith(
        'Most of the first steps are critical, so that "rise" alerts cannot fire.'
    )
    assert "likelier, or less likely, than the logged entropies predict" in by_name["surprisal_off"].why
    assert WATCHING_REASONS["watching"] == "No reason to lower the rate."


def test_the_owner_of_the_entropy_is_named_in_words() -> None:
    check = CHECKS["entropy_of_trainer"]
    assert check.title == "the logged entropy is the trainer's, not the engine's"
    assert check.auxiliary
    assert [each.name for each in CHECKS.values() if each.auxiliary] == ["entropy_of_trainer"]


@pytest.mark.parametrize(
    ("measured", "words"), [(0, "the mismatch was not logged"), (3, "too few steps measured the mismatch")]
)
def test_an_order_that_is_not_known_is_not_told(measured: int, words: str) -> None:
    k3 = [1e-4] * measured + [None] * (40 - measured)
    assert order_in_words(mismatch_at_fall(range(40), k3, 20)).startswith(words)
    assert order_in_words({}) == ""


@pytest.mark.parametrize(("healthy_end", "first"), [(1e-3, "healthy"), (3e-4, "mismatch")])
def test_a_rise_within_the_healthy_range_comes_first_of_nothing(healthy_end: float, first: str) -> None:
    k3 = [2e-5] * 15 + [5e-4] * 25
    found = mismatch_at_fall(range(40), k3, 30, healthy_end)
    assert found["first"] == first
    assert ("k3_onset_step" in found) == (first == "mismatch")
    assert order_in_words(found).startswith(
        "the mismatch " + ("was healthy then (k3 5.0e-4)" if first == "healthy" else "rose")
    )


def test_a_part_with_all_of_the_mismatch_is_told_without_an_interval() -> None:
    found = [each.sentence for each in conclude_links(evidence_of(attributed((0.0, 0.1, 0.0))), [])]
    assert any(
        each.startswith("All of the mismatch is in one link, numerics between engine and trainer: ") for each in found
    )
    shared = [each.sentence for each in conclude_links(evidence_of(attributed((0.03, 0.1, 0.0), spread=0.3)), [])]
    assert any(each.startswith("Most of the mismatch, 9") for each in shared)
