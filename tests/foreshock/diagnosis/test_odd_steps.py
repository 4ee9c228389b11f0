"""Single bad steps: one, three after a resume, every sixth of a bad replica."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from foreshock.api.diagnosis import Diagnosis
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.diagnose import diagnose
from foreshock.diagnosis.history import History, PastAlert, SteppedValues
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.odd_steps import odd_steps
from tests.foreshock.diagnosis.curves import noisy, watch
from tests.foreshock.diagnosis.test_course import wandering


def with_bad(steps: int, bad: set[int], level: float = 0.68) -> np.ndarray:
    values = noisy(np.full(steps, 3e-4), 0.2)
    values[[step - 1 for step in sorted(bad)]] = level
    return values


def diagnosed(k3: np.ndarray, **changes: object) -> Diagnosis:
    """Return the diagnosis of a run with this k3 from step 1 on, with the alerts of the rules."""
    _, events = watch(ClosedStep(step, {K3: value}) for step, value in enumerate(k3.tolist(), 1))
    over = {(each.rule, each.fired_step): each.step for each in events if each.change == "cleared"}
    alerts = tuple(
        PastAlert(
            each.rule, each.severity, each.step, (each.rule, each.step) not in over, each.why, each.what_to_do,
            each.value, each.threshold, each.evidence, over.get((each.rule, each.step)),
        )
        for each in events if each.change == "fired"
    )  # fmt: skip
    steps = list(range(1, k3.size + 1))[-64:]
    history = History(
        alerts=alerts,
        observed_step=k3.size,
        newest_step=k3.size,
        k3=SteppedValues(steps, k3[-64:].tolist()),
        tokens=[5000] * len(steps),
        reward=SteppedValues(steps, [0.9] * len(steps)),
        model_kind="dense",
    )
    return diagnose(replace(history, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [5, 31, 58])
def test_one_bad_step_is_dated_and_the_run_is_healthy_since(step: int) -> None:
    found = diagnosed(with_bad(60, {step}))
    assert found.verdict == "healthy"
    assert re.search(r"is [23]\.\de-4 in the newest 10", found.headline)
    assert found.headline.endswith(f"but k3 was 0.68 at step {step}, healthy since.")
    assert [each.name for each in found.causes] == ["mismatch_in_steps"]
    assert f"Step {step}: k3 was 0.68; it was back at step {step + 1}." in found.parts()["What happened, in order"]


def test_a_bad_step_is_still_an_event_when_the_window_has_passed_it() -> None:
    found = diagnosed(with_bad(200, {5}))
    assert "but" not in found.headline
    assert found.parts()["What happened, in order"] == ["Step 5: k3 was 0.68; it was back at step 6."]


def test_steps_after_a_resume_are_told_with_it() -> None:
    found = diagnosed(with_bad(30, {5, 6, 7}, 0.13), resumes=[5])
    assert found.headline.endswith("but k3 was about 0.13 in steps 5 to 7, at the resume, healthy since.")
    assert "Steps 5 to 7: k3 was 0.13 at step 5; it was back at step 8." in found.parts()["What happened, in order"]
    assert "at the resume" not in diagnosed(with_bad(30, {5, 6, 7}, 0.13), resumes=[12]).headline


@pytest.mark.parametrize("every", [2, 6, 11])
def test_a_bad_replica_is_counted_and_a_warning(every: int) -> None:
    bad = set(range(every, 61, every))
    found = diagnosed(with_bad(60, bad))
    assert (found.verdict, found.since) == ("critical" if every == 2 else "warning", every)
    assert f"k3 is about 0.68 in {len(bad)} of 60 steps, every {every} steps" in found.headline
    assert found.causes[0].name == "mismatch_in_steps"
    assert "engine_id" in found.next_steps[0]


def test_a_recurring_fault_keeps_its_date_in_a_long_run() -> None:
    assert diagnosed(with_bad(300, set(range(6, 301, 6)))).since == 6


def test_what_stays_or_wanders_is_no_single_step() -> None:
    start = np.full(30, 3e-4)
    for values in (
        np.r_[start, np.full(30, 0.02)],  # a jump
        np.r_[start, 3e-4 * 1.3 ** np.arange(30)],  # a ramp
        np.r_[start, [0.68]],  # not known yet if it stays
        np.r_[start, np.full(10, 0.02), start],  # an episode
        np.full(30, 0.05),
    ):
        assert odd_steps(range(values.size), values.tolist(), 1e-3) is None
    random = np.random.default_rng(4)
    for _ in range(50):
        assert odd_steps(range(64), wandering(random, 0.97, 64).tolist(), 1e-3) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_ramp_has_no_odd_steps(seed: int) -> None:
    ramp = noisy(np.r_[np.full(40, 1e-3), np.geomspace(1e-3, 3.5e-2, 24)], 0.25, seed)
    late = noisy(np.geomspace(2e-3, 1e-1, 64), 0.25, seed)
    for values in (ramp, late, late[::-1]):
        assert odd_steps(range(1, 65), values.tolist(), 1e-3) is None
    # A single step that is over stands out, however k3 rises before it.
    single = noisy(np.full(64, 1e-3), 0.25, seed)
    single[50] = 0.5
    found = odd_steps(range(1, 65), single.tolist(), 1e-3)
    assert found is not None
    assert found.groups == ((51,),)
