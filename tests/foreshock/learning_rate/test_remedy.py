"""What is decided beside the rate, where the truth is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from foreshock.learning_rate.control_loop import LoopSettings, LoopState
from foreshock.learning_rate.levers import Correction, Rollback
from foreshock.learning_rate.remedy import (
    LEAST_ROLLOUTS,
    Situation,
    decide_remedy,
    effective_sample,
    finding,
    resume_command,
)
from tests.foreshock.batches import compared
from tests.foreshock.corrections.direct import batch_of

SETTINGS = LoopSettings()
TIS, MIS = Correction("token_tis", "2"), Correction("sequence_mis", "2")
LAGGING = LoopState(static=2e-4, measured_static=True, driven=1e-3, average=1e-3)
"""A mismatch from lag, within its set point."""
DRIVEN = replace(LAGGING, driven=2e-2, average=2e-2, error=1.2, log_scale=-0.5)
"""The same beyond it: the rate is lowered."""
NUMERICS = LoopState(static=2e-2, measured_static=True, driven=0.0, average=0.0)
CHECKPOINTS = tuple(Rollback(step, "runs", f"checkpoint-{step - 1}") for step in (21, 41, 61))


def sample_left(spread: float, rollouts: int = 64) -> float | None:
    """Return what sequence MIS leaves of rollouts of 20 tokens; log ρ has this standard deviation, and E[ρ] = 1."""
    d = np.random.default_rng(0).normal(-(spread**2) / 2, spread, (rollouts, 20))
    step = compared(batch_of(d.tolist()))
    return effective_sample(MIS, step.statistics, step.summaries)


def test_healthy_run_is_told_nothing() -> None:
    found = decide_remedy(Situation(LoopState(static=2e-4, driven=0.0, average=0.0, update=1e-5, updates=20), SETTINGS))
    assert (found.name, found.correction, found.rollback, found.why) == ("nothing", None, None, "")


def test_loop_that_is_off_decides_nothing() -> None:
    found = decide_remedy(Situation(DRIVEN, LoopSettings(enabled=False), collapse=30, checkpoints=CHECKPOINTS))
    assert (found.name, found.correction, found.rollback) == ("nothing", None, None)


def test_lag_within_its_set_point_has_token_tis_at_2_and_the_full_rate() -> None:
    found = decide_remedy(Situation(LAGGING, SETTINGS))
    assert (found.name, found.correction) == ("correction", TIS)
    assert found.why == "Token TIS at 2: 1.0e-3 nats per token of the mismatch come from lag."


def test_lag_beyond_its_set_point_has_the_correction_and_a_lower_rate() -> None:
    found = decide_remedy(Situation(DRIVEN, SETTINGS))
    assert (found.name, found.correction) == ("correction_and_decay", TIS)
    assert found.why == "Token TIS at 2 and a lower rate: 2.0e-2 nats per token of the mismatch come from lag."


def test_driven_part_of_other_prompts_alone_needs_no_correction() -> None:
    of_prompts = replace(LAGGING, static=1e-4, driven=1.9e-4, average=1.9e-4)
    assert decide_remedy(Situation(of_prompts, SETTINGS)).correction is None
    assert decide_remedy(Situation(replace(of_prompts, average=2.1e-4), SETTINGS)).correction == TIS
    # A large static part hides no driven one beyond the set point.
    large = replace(of_prompts, static=2e-2, average=2.5e-2)
    assert decide_remedy(Situation(large, SETTINGS)).correction == TIS


def test_driven_part_above_a_static_one_that_was_not_measured_counts_beyond_its_set_point() -> None:
    unknown = replace(LAGGING, measured_static=False)
    assert decide_remedy(Situation(unknown, SETTINGS)).correction is None
    assert decide_remedy(Situation(replace(unknown, average=2e-2), SETTINGS)).correction == TIS


def test_update_beyond_its_set_point_has_the_correction_without_any_lag() -> None:
    point = SETTINGS.update_set_point
    state = LoopState(static=2e-4, measured_static=True, driven=0.0, average=0.0, update=4 * point, updates=20)
    found = decide_remedy(Situation(state, SETTINGS))
    assert (found.name, found.correction) == ("correction", TIS)
    assert "an update moves the policy by 8.0e-3 nats per token, 4 × its set point" in found.why


def test_correction_stays_on_when_its_reason_has_gone() -> None:
    calm = replace(LAGGING, driven=0.0, average=0.0)
    assert decide_remedy(Situation(calm, SETTINGS)).correction is None
    found = decide_remedy(Situation(calm, SETTINGS, correction=TIS))
    assert (found.name, found.correction, found.why) == ("nothing", TIS, "")


def test_static_mismatch_beyond_the_set_point_is_a_cause_to_find() -> None:
    found = decide_remedy(Situation(NUMERICS, SETTINGS))
    assert (found.name, found.correction) == ("cause", None)
    assert found.why == finding(NUMERICS, SETTINGS)
    # More from lag than from numerics: the correction helps, and the rest is told.
    both = decide_remedy(Situation(replace(NUMERICS, driven=0.05, average=0.05), SETTINGS))
    assert (both.name, both.correction) == ("correction", TIS)
    assert "Besides, 0.02 nats per token of the mismatch are static" in both.why


@pytest.mark.parametrize(("spread", "expected"), [(0.1, MIS), (0.5, TIS)])
def test_sequence_correction_needs_a_trainer_that_asks_and_a_sample(spread: float, expected: Correction) -> None:
    found = decide_remedy(Situation(DRIVEN, SETTINGS, asked_ess=sample_left(spread), asked=MIS))
    assert found.correction == expected
    assert ("which the trainer asks for, would leave" in found.why) is (expected == TIS)
    assert decide_remedy(Situation(DRIVEN, SETTINGS)).correction == TIS


def test_correction_in_force_is_not_replaced_in_mid_run() -> None:
    assert decide_remedy(Situation(DRIVEN, SETTINGS, asked=MIS, correction=TIS)).correction == TIS


def test_collapse_goes_back_to_the_newest_checkpoint_before_its_onset_with_the_correction() -> None:
    found = decide_remedy(Situation(LAGGING, SETTINGS, collapse=50, checkpoints=CHECKPOINTS))
    assert (found.name, found.correction, found.rollback) == ("rollback", TIS, CHECKPOINTS[1])
    assert found.why == (
        "The reward collapsed from step 50: go back to the checkpoint of step 41 and go on with token TIS at 2."
    )


def test_proposal_stays_the_same_during_an_episode() -> None:
    newer = (*CHECKPOINTS, Rollback(50, "runs", "checkpoint-49"))
    known = Situation(LAGGING, SETTINGS, collapse=50, checkpoints=newer, proposed=CHECKPOINTS[0])
    assert decide_remedy(known).rollback == CHECKPOINTS[0]


def test_checkpoint_that_the_run_went_back_to_is_not_proposed_again() -> None:
    known = Situation(LAGGING, SETTINGS, collapse=50, checkpoints=CHECKPOINTS, rolled_back=(41,))
    assert decide_remedy(known).rollback == CHECKPOINTS[0]
    assert decide_remedy(replace(known, rolled_back=(41, 21))).rollback is None


@pytest.mark.parametrize("checkpoints", [(), CHECKPOINTS[2:]])
def test_collapse_without_an_earlier_checkpoint_says_so(checkpoints: tuple[Rollback, ...]) -> None:
    found = decide_remedy(Situation(LAGGING, SETTINGS, collapse=50, checkpoints=checkpoints))
    assert (found.name, found.rollback) == ("correction", None)
    assert "no checkpoint from before it is left" in found.why


@pytest.mark.parametrize("state", [LAGGING, LoopState()])
def test_rollback_of_a_run_without_a_mismatch_to_correct_by_has_no_correction(state: LoopState) -> None:
    fault = "the two log-probs are the same numbers" if state is LAGGING else ""
    known = Situation(state, SETTINGS, fault=fault, collapse=50, checkpoints=CHECKPOINTS)
    found = decide_remedy(known)
    assert (found.name, found.correction, found.rollback) == ("rollback", None, CHECKPOINTS[1])
    assert found.why == "The reward collapsed from step 50: go back to the checkpoint of step 41."
    assert "no checkpoint from before it is left" in decide_remedy(replace(known, checkpoints=())).why
    assert decide_remedy(replace(known, collapse=None)).why == ""
    assert decide_remedy(replace(known, correction=TIS)).correction == TIS


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_measurement_decide_no_rollback(value: float) -> None:
    found = decide_remedy(Situation(replace(LAGGING, average=value, update=value, updates=20), SETTINGS))
    assert found.rollback is None


@pytest.mark.parametrize(("rollouts", "enough"), [(LEAST_ROLLOUTS - 1, False), (LEAST_ROLLOUTS, True)])
def test_fewer_rollouts_than_the_minimum_are_not_evaluated(rollouts: int, enough: bool) -> None:
    assert (sample_left(0.1, rollouts=rollouts) is not None) is enough


@pytest.mark.parametrize("holes", [1, LEAST_ROLLOUTS])
def test_rollouts_with_a_missing_log_prob_are_not_counted(holes: int) -> None:
    batch = batch_of([[0.1, -0.1]] * LEAST_ROLLOUTS)
    assert batch.trainer_log_probs is not None
    batch.trainer_log_probs[: 2 * holes : 2] = math.nan
    step = compared(batch)
    assert effective_sample(MIS, step.statistics, step.summaries) is None


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ("TRL 1.16.0 GRPOTrainer", 'trainer.train(resume_from_checkpoint="checkpoint-40")'),
        (None, "resume the trainer from checkpoint-40"),
    ],
)
def test_command_is_the_frameworks_own(trainer: str | None, expected: str) -> None:
    assert resume_command(trainer, "checkpoint-40") == expected


def test_command_of_verl_names_the_folder_that_it_resumes_from() -> None:
    command = resume_command("verl 0.9.1 fsdp", "global_step_40/actor/huggingface")
    assert command == "trainer.resume_mode=resume_path trainer.resume_from_path=global_step_40"
