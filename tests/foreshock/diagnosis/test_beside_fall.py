"""What came with a fall of the reward, and a fall that is over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.beside_fall import entropy_in_fall, fall_that_is_over, resume_in_fall, spike_before
from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, PastAlert, SteppedValues
from foreshock.diagnosis.reward import FALL_RULE
from tests.foreshock.diagnosis.test_cut_responses import fallen

STEPS = np.arange(67, 131)
FALLEN = fallen(0.2, cut=0.04)
FALL = FALLEN.alerts[0]


def series(values: np.ndarray, noise: float = 0.02) -> SteppedValues:
    factors = 1.0 + noise * np.random.default_rng(3).normal(size=len(values))
    return SteppedValues(list(range(131 - len(values), 131)), (values * factors).tolist())


RISING = series(np.interp(STEPS, [67, 76, 110], [1.6, 1.7, 3.0]))
FLAT = series(np.full(64, 1.7))


def test_an_entropy_that_rises_as_the_reward_falls_is_told_with_it() -> None:
    found = diagnose(replace(FALLEN, entropy=RISING))
    assert "the entropy rose from 1.6 to 3.0 with it" in found.headline
    assert "If the prompts are as before, the policy goes towards noise" in found.next_steps[0]
    narrowed = diagnose(replace(FALLEN, entropy=series(np.interp(STEPS, [76, 90], [1.7, 0.2]))))
    assert "the entropy fell from 1.7 to 0.20 with it" in narrowed.headline


@pytest.mark.parametrize("first", ["mismatch", "together", "unknown"])
def test_an_entropy_explains_no_fall_that_a_mismatch_may_explain(first: str) -> None:
    fall = replace(FALL, evidence={**FALL.evidence, "first": first})
    assert entropy_in_fall(fall, replace(FALLEN, entropy=RISING)) == ()


def test_an_entropy_that_wanders_is_not_told() -> None:
    assert entropy_in_fall(FALL, replace(FALLEN, entropy=FLAT)) == ()
    assert entropy_in_fall(FALL, replace(FALLEN, entropy=series(np.full(64, 1.7), noise=0.4))) == ()


def test_a_fall_at_a_resume_names_it_and_what_moved_at_once() -> None:
    entropy = series(np.where(STEPS < 76, 1.1, 2.4))
    found = diagnose(replace(FALLEN, entropy=entropy, length=FLAT, resumes=(76,)))
    assert "it fell at the resume at step 76, and the entropy went from 1.1 to 2.4" in found.headline
    assert "Check which checkpoint was loaded at step 76" in found.next_steps[0]
    assert resume_in_fall(FALL, replace(FALLEN, resumes=(90,))) == ()


def gradients(values: dict[int, float]) -> SteppedValues:
    return SteppedValues(list(range(56, 87)), [values.get(step, 0.5) for step in range(56, 87)])


def test_a_gradient_far_above_all_others_just_before_the_fall_is_named() -> None:
    found = diagnose(replace(FALLEN, gradients=gradients({75: 81.0})))
    assert "a gradient norm of 81 at step 75" in found.headline
    assert "clip the gradient" in found.next_steps[0]
    for other in ({60: 81.0}, {60: 60.0, 75: 81.0}, {84: 81.0}):
        assert spike_before(FALL, gradients(other)) == ()


def over(cleared: int, deviations: float) -> History:
    evidence = {**FALL.evidence, "deviations": deviations}
    past = replace(FALL, is_open=False, cleared=cleared, evidence=evidence)
    reward = series(np.where((STEPS >= 76) & (cleared > STEPS), 0.14, 0.58))
    return replace(FALLEN, alerts=(past,), reward=reward, gradients=gradients({75: 81.0}))


def test_a_fall_that_is_over_is_told_in_a_healthy_headline() -> None:
    found = diagnose(over(100, 9.0))
    assert found.verdict == "healthy"
    said = "but the reward fell from 0.58 to 0.14 at step 76, and is back since step 100"
    assert said in found.headline
    assert "(a gradient norm of 81 at step 75)" in found.causes[0].sentence
    without_reason = diagnose(replace(over(100, 9.0), gradients=SteppedValues()))
    assert said in without_reason.headline
    assert [without_reason.causes[0].what_to_do, *without_reason.next_steps] == [""]
    assert fall_that_is_over(over(100, 2.0)) == ()  # noise may have made it
    assert fall_that_is_over(over(60, 9.0)) == ()  # long ago


def test_a_slight_mismatch_that_did_not_rise_before_the_fall_is_told_after_it() -> None:
    slight = PastAlert(
        "mismatch_warning", "warning", 70, True, "k3 is above its range.", evidence={"cause": "mismatch"}
    )
    fall = replace(FALL, rule=FALL_RULE, severity="warning")
    assert diagnose(replace(FALLEN, alerts=(slight, fall))).headline.startswith(
        "Warning since step 76: the reward fell"
    )
    rose = replace(fall, evidence={**fall.evidence, "first": "mismatch", "k3_onset_step": 70})
    assert not diagnose(replace(FALLEN, alerts=(slight, rose))).headline.startswith("Warning since step 76")
