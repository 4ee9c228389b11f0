"""The one judge of runs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreshock.api.diagnosis import Diagnosis, DiagnosisCause, MissingData, diagnosis_of
from foreshock.api.records import to_json
from foreshock.api.runs import ChangeRecord
from foreshock.diagnosis.diagnose import LEAST_MEASURED_STEPS, diagnose
from foreshock.diagnosis.history import AwaitedShards, History, PastAlert, SteppedValues
from foreshock.diagnosis.mismatch_rules import K3, LOWER, PROBE
from foreshock.diagnosis.quantities import LARGEST_D_KEY, MEAN_D_KEY
from foreshock.lint import CHECKS
from foreshock.lint.checks.duplicates import ALIKE, COPIES, DUPLICATED

STEPS = range(40)
HEALTHY = History(
    observed_step=39,
    k3=SteppedValues(list(STEPS), [2e-5] * 40),
    tokens=[5000] * 40,
    reward=SteppedValues(list(STEPS), [0.9] * 40),
)
RISE = PastAlert(
    "mismatch_rise", "warning", 20, True, "k3 has risen fivefold. It was lower.", "Probe a step.", 1e-3, 2e-4
)
COLLAPSE = PastAlert(
    "reward_collapse", "critical", 30, True, "The reward fell from 0.85 to 0.03.", "Lower the learning rate.",
    0.03, 0.4, {"onset_step": 25},
)  # fmt: skip


def test_a_healthy_run_gives_its_numbers() -> None:
    found = diagnose(HEALTHY)
    assert found.verdict == "healthy"
    assert found.since is None
    assert found.headline == (
        "Healthy: the mismatch (k3) is 2.0e-5 in the newest 10 measured steps; the reward, 0.90, is near its best."
    )


def test_the_gravest_open_alert_is_the_verdict_since_the_step_at_which_it_fired() -> None:
    found = diagnose(replace(HEALTHY, alerts=(COLLAPSE, RISE)))
    assert (found.verdict, found.since) == ("critical", 25)
    assert found.headline == (
        "Critical since step 25: the reward fell from 0.85 to 0.03 (found at step 30); 1 more episode."
    )
    assert [each.rule for each in found.events] == ["mismatch_rise", "reward_collapse"]
    way_back = "Stop, or go back to a checkpoint from before step 20, where it began."
    assert found.next_steps == (f"{way_back} {LOOK}", "Probe a step.")


LOOK = "Look at the learning rate, the data and the mismatch."


def test_the_way_back_is_the_newest_checkpoint_from_before_the_first_thing_that_went_wrong() -> None:
    collapsed = replace(HEALTHY, alerts=(COLLAPSE, RISE))
    for checkpoints, place in (
        ((5, 15, 24), "the checkpoint of step 15, the newest from before step 20"),
        ((24,), "a checkpoint from before step 20, where it began; no announced one is so old"),
    ):
        found = diagnose(replace(collapsed, checkpoints=checkpoints))
        assert found.next_steps[0] == f"Stop, or go back to {place}. {LOOK}"
    # The mismatch had risen at step 12, long before the reward fell at 25.
    early = replace(COLLAPSE, evidence={"onset_step": 25, "first": "mismatch", "k3_onset_step": 12})
    found = diagnose(replace(HEALTHY, alerts=(early,), checkpoints=(5, 15, 24)))
    assert "the checkpoint of step 5, the newest from before step 12" in found.next_steps[0]


def test_an_older_critical_alert_comes_before_the_fall_of_the_reward() -> None:
    older = replace(RISE, severity="critical")
    found = diagnose(replace(HEALTHY, alerts=(COLLAPSE, older)))
    assert found.since == 20
    assert found.headline == (
        "Critical since step 20: k3 has risen fivefold; the reward fell from 0.85 to 0.03 from step 25 on."
    )


def test_lengths_that_grew_before_a_collapse_are_told_below_it() -> None:
    surge = replace(RISE, rule="length_surge", severity="critical", evidence={"cause": "length"})
    assert diagnose(replace(HEALTHY, alerts=(COLLAPSE, surge))).headline.startswith(
        "Critical since step 25: the reward"
    )


def test_a_possible_cause_of_as_many_steps_stands_above_a_place() -> None:
    place = DiagnosisCause(
        name="mismatch_by_place", title="k3 rises with the position", sentence="", source="lint", evidence={"steps": 26}
    )
    cause = replace(
        place, name="temperature_of_trainer", title="the trainer does not apply the temperature", certainty="possible"
    )
    often, seldom = (replace(cause, evidence={"steps": steps}) for steps in (93, 3))
    assert [each.name for each in diagnose(replace(HEALTHY, causes=(place, often))).causes] == [often.name, place.name]
    assert (
        "probably the trainer does not apply"
        in diagnose(replace(HEALTHY, alerts=(RISE,), causes=(place, often))).headline
    )
    assert [each.name for each in diagnose(replace(HEALTHY, causes=(place, seldom))).causes] == [
        place.name,
        seldom.name,
    ]
    assert "the data show: k3 rises" in diagnose(replace(HEALTHY, alerts=(RISE,), causes=(place, seldom))).headline


NAMED = DiagnosisCause(
    name="temperature/trainer",
    title="π is at temperature 1.0, and μ at 0.70 (step 1)",
    sentence="π is at temperature 1.0, and μ at 0.70 (step 1).",
    source="doctor",
    what_to_do="Divide the logits by it.",
    evidence={"step": 1},
)
SEEN = replace(
    NAMED, name="temperature_of_trainer", source="lint", certainty="possible", title="the trainer forgets", evidence={}
)


@pytest.mark.parametrize(("newest", "is_told"), [(30, True), (3, False)])
def test_a_setting_that_the_doctor_named_at_an_early_step_is_told_if_the_lint_still_sees_it(
    newest: int, is_told: bool
) -> None:
    seen = replace(SEEN, evidence={"steps": 9, "newest_step": newest})
    window = replace(HEALTHY, k3=SteppedValues(range(11, 31), [2e-2] * 20), alerts=(COLLAPSE,), causes=(seen, NAMED))
    found = diagnose(window)
    assert [each.name for each in found.causes] == [NAMED.name]
    assert found.causes[0].evidence == {"steps": 9, "newest_step": newest, "step": 1}
    assert ("the data show: π is at temperature 1.0" in found.headline) == is_told
    # What to do for the setting stands in the place of where to look.
    where = "Stop, or go back to a checkpoint from before step 25, where it began."
    assert found.next_steps == ((f"{where} {NAMED.what_to_do}",) if is_told else (f"{where} {LOOK}", NAMED.what_to_do))
    probed = replace(NAMED, name="link", source="probe", evidence={"step": 30}, what_to_do="")
    assert diagnose(replace(window, causes=(seen, NAMED, probed))).next_steps == found.next_steps


def test_a_setting_is_no_reason_of_a_fall_that_the_mismatch_followed() -> None:
    later = replace(COLLAPSE, evidence={**COLLAPSE.evidence, "first": "reward", "k3_onset_step": 27})
    named = replace(NAMED, evidence={"step": 30})
    steps = diagnose(replace(HEALTHY, alerts=(later,), causes=(named,))).next_steps
    assert steps[0].endswith("The mismatch rose later: look at the learning rate and the data.")
    assert steps[1] == NAMED.what_to_do


def test_a_place_is_not_to_be_looked_at_when_the_setting_is_named() -> None:
    place = DiagnosisCause(
        name="mismatch_by_place", title="k3 rises", sentence="k3 rises.", source="lint", what_to_do="Look there."
    )
    named = replace(NAMED, evidence={"step": 30})
    assert diagnose(replace(HEALTHY, alerts=(RISE,), causes=(place,))).next_steps[0] == place.what_to_do
    found = diagnose(replace(HEALTHY, alerts=(RISE,), causes=(place, named)))
    assert found.next_steps == (NAMED.what_to_do, RISE.what_to_do)


@pytest.mark.parametrize("is_growing", [True, False])
def test_a_mismatch_of_one_engine_that_grows_from_the_start_is_of_its_weights(is_growing: bool) -> None:
    title = "k3 averages 0.263 in the 16 rollouts of the engine dp2, and 3.8e−4 elsewhere"
    place = DiagnosisCause(
        name="mismatch_by_place", title=title, sentence=f"{title}.", source="lint", what_to_do="Compare the engines."
    )
    steps, of_steps = list(range(1, 61)), [1e-3 * step if is_growing else 0.03 for step in range(60)]
    k3 = SteppedValues(steps, [4e-4 + each for each in of_steps])
    found = diagnose(replace(HEALTHY, k3=k3, tokens=[5000] * 60, causes=(place,)))
    (cause,) = (each for each in found.causes if each.name == place.name)
    assert ("the engine looks as if it kept old weights" in cause.sentence) == is_growing
    assert cause.what_to_do.startswith("Check that updates reach this engine" if is_growing else "Compare the engines")


@pytest.mark.parametrize(("steps", "is_told"), [(1, False), (3, True)])
def test_a_place_of_a_healthy_mismatch_that_one_step_shows_is_chance(steps: int, is_told: bool) -> None:
    place = DiagnosisCause(
        name="mismatch_by_place", title="k3 falls", sentence="k3 falls.", source="lint", evidence={"steps": steps}
    )
    assert ("but k3 falls" in diagnose(replace(HEALTHY, causes=(place,))).headline) == is_told


def test_a_fall_of_which_most_is_recovered_is_no_news_beside_the_mismatch() -> None:
    rise = replace(RISE, evidence={"cause": "mismatch"})
    evidence = {"before": 0.9, "now": 0.5, "onset_step": 25, "cause": "reward"}
    fall = replace(FELL, rule="reward_fall", severity="warning", evidence=evidence)
    for now, is_told in ((0.85, False), (0.6, True)):
        reward = SteppedValues(HEALTHY.reward.steps, [now] * len(HEALTHY.reward.steps))
        found = diagnose(replace(HEALTHY, reward=reward, alerts=(rise, fall)))
        assert ("the reward fell" in found.headline) == is_told


def test_of_alerts_of_one_step_the_mismatch_is_told() -> None:
    others = tuple(replace(RISE, rule=rule, why=f"{rule}.") for rule in ("chi2_high", "tail_heavy"))
    rise = replace(RISE, evidence={"cause": "mismatch"})
    assert "k3 has risen fivefold; 2 more" in diagnose(replace(HEALTHY, alerts=(*others, rise))).headline


def test_a_run_with_an_open_alert_does_not_wait_for_more_data() -> None:
    young = replace(HEALTHY, k3=SteppedValues([0, 1], [2e-5] * 2), tokens=[5000] * 2, alerts=(RISE,))
    assert diagnose(young).missing == ()


def test_info_and_closed_alerts_never_change_the_verdict() -> None:
    alerts = (replace(RISE, severity="info"), replace(COLLAPSE, is_open=False))
    assert diagnose(replace(HEALTHY, alerts=alerts)).verdict == "healthy"


def test_what_the_trainer_reports_is_told_and_not_judged() -> None:
    found = diagnose(replace(HEALTHY, k3=SteppedValues(), tokens=[], reported={K3: 2e-4}))
    assert found.headline.startswith(
        "Unknown: no step has both log-probs; the trainer reports a k3 of 2.0e-4, which cannot be checked; the "
    )


def test_a_reported_k3_that_the_reported_differences_exclude_is_told_as_such() -> None:
    reported = {K3: 2.3, MEAN_D_KEY: 4e-3, LARGEST_D_KEY: 0.3}
    found = diagnose(replace(HEALTHY, k3=SteppedValues(), tokens=[], reported=reported))
    assert found.missing[0].sentence == (
        "no step has both log-probs; the trainer reports a k3 of 2.3, which contradicts the logged mean and largest "
        "|d|, 4.0e-3 and 0.30, with which k3 is at most 6.6e-4"
    )


def test_a_reward_below_the_best_of_a_fall_that_is_over_has_fallen() -> None:
    over = replace(COLLAPSE, is_open=False, evidence={"onset_step": 25, "best": 1.2})
    assert diagnose(replace(HEALTHY, alerts=(over,))).headline.endswith("; the reward is 0.90.")
    long = SteppedValues(list(range(64)), [0.9] * 64)
    assert diagnose(replace(HEALTHY, reward=long)).headline.endswith("is near its best of the newest 64 steps.")


def test_an_undeclared_kind_of_model_is_told_beside_an_alert_of_the_mismatch() -> None:
    alert = replace(RISE, evidence={"cause": "mismatch"})
    assert "kind of model" in str(diagnose(replace(HEALTHY, alerts=(alert,))).missing)
    assert not diagnose(replace(HEALTHY, alerts=(alert,), model_kind="moe")).missing
    assert not diagnose(HEALTHY).missing


def test_what_clients_lost_is_missing() -> None:
    alert = PastAlert("client_losses", "warning", 4, is_open=True, why="6 items", what_to_do="Read the log.", value=6.0)
    (missing,) = diagnose(replace(HEALTHY, alerts=(alert,))).missing
    assert (missing.sentence, missing.what_to_do) == (
        "6 of the logged items and rollouts did not arrive",
        "Read the log.",
    )
    assert not diagnose(replace(HEALTHY, alerts=(replace(alert, is_open=False),))).missing


def test_too_little_is_unknown_and_says_what_is_missing() -> None:
    no_log_probs = diagnose(replace(HEALTHY, k3=SteppedValues(), tokens=[]))
    assert no_log_probs.headline == "Unknown: no step has both log-probs; the reward, 0.90, is near its best."
    few = LEAST_MEASURED_STEPS - 1
    young = replace(HEALTHY, k3=SteppedValues(list(range(few)), [2e-5] * few), tokens=[5000] * few)
    assert diagnose(young).headline.startswith(f"Unknown: {few} steps with both log-probs")
    sparse = replace(HEALTHY, tokens=[8] * 40)
    assert diagnose(sparse).headline.startswith("Unknown: 80 tokens measured in the newest steps")


def test_k3_above_the_range_is_not_healthy_before_an_alert_fires() -> None:
    above = replace(HEALTHY, k3=SteppedValues([each + 5 for each in STEPS], [2e-3] * 40), model_kind="dense")
    found = diagnose(above)
    assert (found.verdict, found.since) == ("warning", 5)
    assert found.headline == (
        "Warning since step 5: the mismatch (k3) is 2.0e-3, healthy to 1.0e-3, in each of 40 steps; the reward, 0.90, "
        "is near its best."
    )
    assert found.next_steps[-1] == PROBE
    once = diagnose(replace(above, k3=SteppedValues(list(STEPS), [5e-4, *[2e-3] * 39])))
    assert once.headline == (
        "Unknown: the mismatch (k3) is 2.0e-3 in the newest 10 measured steps, healthy to 1.0e-3; more steps will tell "
        "if it stays; the reward, 0.90, is near its best."
    )
    assert diagnose(replace(above, alerts=(RISE,))).verdict == "warning"
    assert diagnose(replace(above, model_kind="moe")).verdict == "healthy"


def test_waiting_for_shards_is_said_once_and_is_all_that_is_missing_before_the_first_step() -> None:
    awaited = AwaitedShards(step=0, missing=(2, 3), expected=4, since_us=(14 * 60 + 2) * 60_000_000)
    found = diagnose(History(awaited=(awaited,)))
    assert found.headline == "Unknown: step 0 is waiting for ranks 2 and 3 of 4 since 14:02 UTC."
    assert len(found.missing) == 1
    many = diagnose(History(awaited=(replace(awaited, missing=tuple(range(1, 512)), expected=512),)))
    assert many.headline == (
        "Unknown: step 0 is waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 503 more of 512 since 14:02 UTC."
    )


def test_copied_log_probs_are_not_healthy() -> None:
    copied = PastAlert("scores_identical", "info", 3, True, "Log-probs are equal.", "Probe a step.")
    assert diagnose(replace(HEALTHY, alerts=(copied,))).headline.startswith(
        "Unknown: the trainer's log-probs equal the engine's bit for bit"
    )


@pytest.mark.parametrize("rewards", [[0.9] * 20 + [0.5] * 20, [0.0] * 5 + [0.9] * 5])
def test_a_reward_that_fell_or_is_young_is_only_given(rewards: list[float]) -> None:
    reward = SteppedValues(list(range(len(rewards))), rewards)
    assert "is near its best" not in diagnose(replace(HEALTHY, reward=reward)).headline


def test_a_probe_replaces_what_only_looks_like_a_cause() -> None:
    looks = DiagnosisCause(name="shift", sentence="Looks like a shift.", source="lint", certainty="possible")
    proved = DiagnosisCause(name="stale", sentence="Step 1's weights.", source="probe", what_to_do="Sync.")
    found = diagnose(replace(HEALTHY, causes=(looks, proved)))
    assert [each.name for each in found.causes] == ["stale"]
    assert found.next_steps[0] == "Sync."


SHIFT = DiagnosisCause(
    name="shifted_log_probs", sentence="The two are shifted.", source="lint", title="they are shifted"
)
FLAT = DiagnosisCause(
    name="no_reward_spread", sentence="No spread.", source="lint", title="no group has a spread", explains=False,
    what_to_do="Check the reward.", evidence={"first_step": 1},
)  # fmt: skip
ENTROPY = DiagnosisCause(name="entropy_of_trainer", sentence="Of π.", source="lint", explains=False)


def test_the_headline_names_what_makes_the_mismatch() -> None:
    found = diagnose(replace(HEALTHY, alerts=(RISE,), causes=(ENTROPY, FLAT, SHIFT)))
    assert found.headline == "Warning since step 20: k3 has risen fivefold; the data show: they are shifted."
    assert [each.name for each in found.causes] == ["shifted_log_probs", "no_reward_spread", "entropy_of_trainer"]
    # A possible cause of the mismatch says more than a proven fault of another column.
    possible = replace(SHIFT, certainty="possible")
    found = diagnose(replace(HEALTHY, alerts=(RISE,), causes=(ENTROPY, possible)))
    assert found.headline == "Warning since step 20: k3 has risen fivefold; probably they are shifted."
    assert found.causes[0].name == "shifted_log_probs"
    healthy = diagnose(replace(HEALTHY, causes=(ENTROPY, FLAT)))
    assert healthy.headline.endswith("is near its best; but no group has a spread.")
    numerics = DiagnosisCause(name="link", sentence="Numerics: 99 %.", source="probe", title="numerics")
    assert "but" not in diagnose(replace(HEALTHY, causes=(numerics,))).headline


@pytest.mark.parametrize(
    ("lengths", "cut", "said"),
    [
        ([100.0] * 40, 0.1, "is near its best."),
        (
            np.linspace(90, 720, 40).tolist(), 0.22,
            "; but responses have grown × 4.0 since step 0; and 22 % of the responses are cut.",
        ),
        ([400.0] * 20 + [40.0] * 20, 0.0, "; but responses have shrunk ÷ 10 since step 0."),
    ],
)  # fmt: skip
def test_lengths_that_change_much_are_named_although_no_rule_fires(lengths: list[float], cut: float, said: str) -> None:
    steps = list(STEPS)
    found = diagnose(replace(HEALTHY, length=SteppedValues(steps, lengths), truncated=SteppedValues(steps, [cut] * 40)))
    assert found.verdict == "healthy"
    assert found.headline.endswith(said)


def test_what_begins_after_the_fall_of_the_reward_is_a_consequence() -> None:
    later = replace(FLAT, evidence={"first_step": 33})
    for cause, is_consequence in ((later, True), (FLAT, False)):
        found = diagnose(replace(HEALTHY, alerts=(COLLAPSE,), causes=(cause,)))
        assert "no group has a spread" not in found.headline
        assert found.causes[0].sentence.endswith(": a consequence.") == is_consequence
        assert ("Check the reward." in found.next_steps) != is_consequence


def test_one_token_a_step_does_not_make_a_run_unhealthy() -> None:
    wild = replace(HEALTHY, k3=SteppedValues(list(STEPS), [0.1] * 40), k3_of_others=[2e-5] * 40)
    found = diagnose(wild)
    assert (found.verdict, found.causes) == ("healthy", ())
    assert "is 2.0e-5 in the newest 10 measured steps without the largest token of each, and 0.10 with it" in (
        found.headline
    )
    assert diagnose(replace(wild, k3_of_others=[0.1] * 40)).verdict == "warning"


def test_a_small_k3_of_log_probs_that_did_not_sample_is_not_healthy() -> None:
    found = diagnose(replace(HEALTHY, causes=(SHIFT, FLAT)))
    assert found.headline == (
        "Warning: they are shifted, so that k3 is not the mismatch; no group has a spread; the reward, 0.90, is near "
        "its best."
    )
    since = diagnose(replace(HEALTHY, causes=(replace(SHIFT, evidence={"first_step": 3}),)))
    assert (since.verdict, since.since) == ("warning", 3)
    assert since.headline.startswith("Warning since step 3: they are shifted")
    undeclared = MissingData(sentence="it cannot be told", what_to_do="Declare logprobs_mode.")
    found = diagnose(replace(HEALTHY, undeclared=(undeclared,)))
    assert "if the logged μ sampled the tokens, which is not declared" in found.headline
    assert found.next_steps == ("Declare logprobs_mode.",)


def test_a_large_mismatch_of_few_steps_is_said() -> None:
    young = replace(HEALTHY, k3=SteppedValues([0, 1], [5e-2] * 2), tokens=[5000] * 2)
    assert "mismatch (k3) 5.0e-2 so far, healthy to 1.0e-3" in diagnose(young).headline
    small = replace(young, k3=SteppedValues([0, 1], [2e-5] * 2))
    assert "so far" not in diagnose(small).headline


def test_after_a_probe_the_doctor_finds_the_setting() -> None:
    link = DiagnosisCause(name="link", sentence="The engine: 95 %.", source="probe", evidence={"step": 35})
    large = replace(HEALTHY, k3=SteppedValues(list(STEPS), [2e-2] * 40))
    asked = "Find the setting: `foreshock doctor RUN --step 35` tries what this link may do."
    assert asked in diagnose(replace(large, causes=(link,))).next_steps
    assert asked not in diagnose(replace(HEALTHY, causes=(link,))).next_steps
    found = replace(link, source="doctor", name="temperature")
    assert asked not in diagnose(replace(large, causes=(link, found))).next_steps


def test_a_cause_yields_to_one_that_says_more() -> None:
    names = ("raw_log_probs", "mean_ratio", "temperatures_differ")
    causes = tuple(DiagnosisCause(name=name, sentence=name, source="lint", certainty="possible") for name in names)
    assert [each.name for each in diagnose(replace(HEALTHY, causes=causes)).causes] == ["raw_log_probs"]
    assert [each.name for each in diagnose(replace(HEALTHY, causes=causes[1:])).causes] == ["temperatures_differ"]


def test_the_diagnosis_does_not_depend_on_the_order_of_alerts() -> None:
    alerts = [replace(RISE, step=step, rule=f"rule_{step}") for step in range(12)]
    want = diagnose(replace(HEALTHY, alerts=tuple(alerts)))
    for seed in range(5):
        random.Random(seed).shuffle(alerts)
        assert diagnose(replace(HEALTHY, alerts=tuple(alerts))) == want


def test_the_record_survives_json() -> None:
    found = diagnose(replace(HEALTHY, alerts=(COLLAPSE,)))
    assert diagnosis_of(to_json(found)) == found
    assert isinstance(found, Diagnosis)


FELL = replace(COLLAPSE, evidence={"onset_step": 25, "before": 0.82, "now": 0.1, "first": "no rise"})


@pytest.mark.parametrize(
    ("now", "low", "said"),
    [(0.05, "0.05", ""), (0.20, "0.20", ""), (0.45, "0.10", " and is 0.45 now"), (0.88, "0.10", " and is 0.88 now")],
)
def test_a_fall_that_is_made_up_for_in_part_is_told_with_both_levels(now: float, low: str, said: str) -> None:
    reward = SteppedValues(list(STEPS), [0.82] * 30 + [now] * 10)
    headline = diagnose(replace(HEALTHY, reward=reward, alerts=(FELL,))).headline
    fell = f"the reward fell from 0.82 to {low} (found at step 30){said};"
    assert headline.startswith(f"Critical since step 25: {fell}")


def test_a_collapse_after_a_slow_fall_is_told_from_the_level_before_both() -> None:
    slow = PastAlert("reward_fall", "warning", 22, True, "", evidence={"onset_step": 8, "before": 0.9, "now": 0.6})
    reward = SteppedValues(list(STEPS), [0.82] * 30 + [0.1] * 10)
    found = diagnose(replace(HEALTHY, reward=reward, alerts=(slow, FELL)))
    assert found.headline.startswith("Critical since step 8: the reward fell from 0.90 to 0.10 (found at step 30);")


def test_what_the_mismatch_had_done_is_said_as_of_the_step_of_the_alert() -> None:
    dated = replace(FELL, evidence={**FELL.evidence, "k3_newest_step": 30})
    assert "the mismatch had not risen by step 30" in diagnose(replace(HEALTHY, alerts=(dated, RISE))).headline
    assert "the mismatch had not risen then" in diagnose(replace(HEALTHY, alerts=(FELL, RISE))).headline


def probed(step: int) -> DiagnosisCause:
    return DiagnosisCause(
        name="numerics", sentence="…", source="probe", title=f"numerics at step {step}", evidence={"step": step}
    )


def test_what_a_probe_said_of_a_step_before_the_newest_ones_is_no_part_of_the_headline() -> None:
    steps = list(range(437, 501))
    looks = DiagnosisCause(name="looks", sentence="…", source="lint", certainty="possible")
    old = replace(
        HEALTHY,
        observed_step=500,
        k3=SteppedValues(steps, [2e-5] * 64),
        tokens=[5000] * 64,
        alerts=(replace(RISE, step=480),),
        causes=(probed(10), looks),
    )
    found = diagnose(old)
    assert "numerics" not in found.headline
    assert {each.name for each in found.causes} == {"numerics", "looks"}
    newer = diagnose(replace(old, causes=(probed(490), looks)))
    assert "the data show: numerics at step 490" in newer.headline
    assert {each.name for each in newer.causes} == {"numerics"}


@pytest.mark.parametrize("last", [64, 65, 500])
def test_what_is_there_since_the_first_step_is_told_however_long_the_run(last: int) -> None:
    newest, first = list(range(max(1, last - 63), last + 1)), list(range(1, 17))
    early = SteppedValues(first, [2e-2] * 16) if newest[0] > 1 else SteppedValues()
    static = replace(
        HEALTHY,
        observed_step=last,
        k3=SteppedValues(newest, [2e-2] * 64),
        tokens=[5000] * 64,
        first_k3=SteppedValues([each for each in early.steps if each < newest[0]], early.values[: newest[0] - 1]),
    )
    assert [each.name for each in diagnose(static).causes] == ["static_mismatch"]


def test_a_fault_that_begins_with_the_first_nan_is_a_consequence_of_it() -> None:
    nan = PastAlert("log_probs_not_finite", "warning", 24, True, "Some log-probs are NaN.", evidence={"cause": "data"})
    cut = replace(FLAT, name="all_truncated", evidence={"first_step": 24}, what_to_do="Raise the limit.")
    found = diagnose(replace(HEALTHY, alerts=(COLLAPSE, nan), causes=(cut,)))
    assert "Raise the limit." not in found.next_steps
    # What is there since the first step is no consequence.
    from_start = replace(cut, evidence={"first_step": 0})
    found = diagnose(replace(HEALTHY, alerts=(COLLAPSE, replace(nan, step=0)), causes=(from_start,)))
    assert "Raise the limit." in found.next_steps


def test_a_possible_cause_is_told_while_more_steps_are_awaited() -> None:
    young = replace(HEALTHY, k3=SteppedValues([0, 1], [5e-2] * 2), tokens=[5000] * 2)
    looks = replace(SHIFT, name="temperatures_differ", title="two temperatures", certainty="possible")
    found = diagnose(replace(young, causes=(looks,)))
    assert found.headline == (
        "Unknown: 2 steps with both log-probs (5 needed); mismatch (k3) 5.0e-2 so far, healthy to 1.0e-3; "
        "probably two temperatures; the reward, 0.90, is near its best."
    )
    assert "probably" not in diagnose(replace(HEALTHY, causes=(looks,))).headline
    above = replace(HEALTHY, k3=SteppedValues(list(STEPS), [5e-4, *[2e-3] * 39]), causes=(looks,))
    assert diagnose(above).headline == (
        "Unknown: the mismatch (k3) is 2.0e-3 in the newest 10 measured steps, healthy to 1.0e-3; probably two "
        "temperatures; the reward, 0.90, is near its best."
    )


@pytest.mark.parametrize(
    ("changes", "is_probed"),
    [
        ({}, False),
        ({"certainty": "possible"}, True),
        ({"name": "mismatch_by_place"}, True),
        ({"source": "detector"}, True),
        ({"explains": False}, True),
    ],
)
def test_a_fault_that_the_data_prove_needs_no_probe_and_no_lower_rate(changes: dict[str, Any], is_probed: bool) -> None:
    alerts = tuple(
        replace(RISE, rule=advice, what_to_do=advice, evidence={"cause": cause})
        for advice, cause in ((PROBE, "mismatch"), (LOWER, "data"))
    )
    found = diagnose(replace(HEALTHY, alerts=alerts, causes=(replace(SHIFT, **changes),)))
    assert [each in found.next_steps for each in (PROBE, LOWER)] == [is_probed, is_probed]


def test_a_policy_that_changed_before_the_reward_fell_is_told() -> None:
    why = "The gradient norm has risen to at least three times this run's own baseline."
    first = replace(RISE, rule="gradient_rise", step=9, why=why, evidence={"cause": "gradient"})
    assert diagnose(replace(HEALTHY, alerts=(first, COLLAPSE))).headline == (
        "Critical since step 25: the reward fell from 0.85 to 0.03; the gradient rose first, from step 9."
    )


def test_a_perplexity_that_rose_with_the_entropy_is_told_as_the_entropy() -> None:
    perplexity = replace(RISE, rule="perplexity_rise", step=9, why="It rose.", evidence={"cause": "policy"})
    entropy = replace(perplexity, rule="entropy_rise", severity="info", step=11)
    found = diagnose(replace(HEALTHY, alerts=(perplexity, entropy, FELL)))
    assert "the entropy rose first, from step 11" in found.headline
    assert found.next_steps[0].startswith("Stop, or go back to a checkpoint from before step 9")
    assert "look at the entropy bonus" in found.next_steps[0]
    alone = diagnose(replace(HEALTHY, alerts=(perplexity, FELL)))
    assert "the perplexity rose first, from step 9" in alone.headline


def test_after_a_policy_that_went_towards_noise_a_fall_does_not_ask_for_the_reward() -> None:
    entropy = replace(RISE, rule="perplexity_rise", step=9, what_to_do="Ask the reward.", evidence={"cause": "policy"})
    evidence = {"before": 0.85, "now": 0.5, "onset_step": 25, "cause": "reward", "first": "no rise"}
    fall = replace(FELL, rule="reward_fall", severity="warning", what_to_do="Compare.", evidence=evidence)
    found = diagnose(replace(HEALTHY, alerts=(entropy, fall)))
    assert found.next_steps[0].startswith("The policy went towards noise first")
    assert "Ask the reward." not in found.next_steps
    later = replace(fall, evidence={**evidence, "first": "mismatch", "k3_onset_step": 20})
    assert diagnose(replace(HEALTHY, alerts=(entropy, later))).next_steps[0] == "Compare."


def test_an_entropy_that_had_collapsed_is_told_if_nothing_else_changed_before_the_reward_fell() -> None:
    entropy = replace(RISE, rule="entropy_fall", severity="info", step=12, evidence={"cause": "policy"})
    evidence = {"before": 0.85, "now": 0.5, "onset_step": 25, "cause": "reward", "first": "healthy", "k3_at": 5e-4}
    fall = replace(FELL, rule="reward_fall", severity="warning", what_to_do="Compare.", evidence=evidence)
    found = diagnose(replace(HEALTHY, alerts=(entropy, fall)))
    assert found.headline.endswith("; the mismatch was healthy then (k3 5.0e-4); the entropy fell first, from step 12.")
    assert found.next_steps[0].startswith("The entropy had collapsed before")
    gradient = replace(RISE, rule="gradient_rise", step=14, evidence={"cause": "gradient"})
    led = diagnose(replace(HEALTHY, alerts=(entropy, gradient, fall)))
    assert led.next_steps[0].startswith("The gradient grew first")
    assert "the entropy fell" not in diagnose(replace(HEALTHY, alerts=(replace(entropy, is_open=False), fall))).headline


@pytest.mark.parametrize(("cleared", "before"), [(27, 9), (24, 25)])
def test_the_way_back_is_from_before_an_alert_that_was_open_when_the_reward_fell(cleared: int, before: int) -> None:
    over = replace(RISE, rule="gradient_rise", step=9, is_open=False, cleared=cleared, evidence={"cause": "gradient"})
    found = diagnose(replace(HEALTHY, alerts=(over, FELL)))
    assert found.next_steps[0].startswith(f"Stop, or go back to a checkpoint from before step {before},")


@pytest.mark.parametrize(("step", "before"), [(14, 14), (9, 25)])
def test_the_way_back_is_from_before_a_late_sign_on_the_policy_that_is_no_warning(step: int, before: int) -> None:
    entropy = replace(RISE, rule="entropy_fall", severity="info", step=step, evidence={"cause": "policy"})
    found = diagnose(replace(HEALTHY, alerts=(entropy, FELL)))
    assert found.next_steps[0].startswith(f"Stop, or go back to a checkpoint from before step {before},")


def test_an_episode_is_found_when_its_first_alert_is() -> None:
    early = replace(RISE, rule="mismatch_warning", step=13, evidence={"cause": "mismatch", "onset_step": 8})
    late = replace(early, rule="mismatch_critical", severity="critical", step=37)
    high = replace(HEALTHY, k3=SteppedValues(range(10, 50), [2.0] * 40), alerts=(early, late))
    found = diagnose(high)
    assert found.headline == "Critical since step 8: the mismatch (k3) is 2.0, healthy to 1.0e-3 (found at step 13)."
    assert [each.sentence[:25] for each in found.events if each.is_told] == ["Step 8 (found at step 13)"]


def test_responses_of_nothing_are_named_where_too_few_tokens_are_measured() -> None:
    shrunk = replace(HEALTHY, tokens=[64] * 40, length=SteppedValues(list(STEPS), [90.0] * 30 + [1.0] * 10))
    found = diagnose(shrunk)
    assert found.headline.startswith(
        "Unknown: 640 tokens measured in the newest steps, 1,000 are needed; the responses have 1 token"
    )
    assert "responses have shrunk ÷ 90 since step 0" in found.headline
    assert found.next_steps == ("Read some responses: a policy may learn to answer with nothing.",)


def test_a_mismatch_that_is_older_than_a_fall_is_where_to_look() -> None:
    fall = replace(FELL, step=9, evidence={"onset_step": 6, "before": 0.82, "now": 0.1, "first": "unknown"})
    mismatch = replace(RISE, rule="mismatch_critical", severity="critical", step=6)
    mismatch = replace(mismatch, evidence={"cause": "mismatch", "onset_step": 2})
    assert "look at the engine" in diagnose(replace(HEALTHY, alerts=(mismatch, fall))).next_steps[0]
    assert "look at the engine" not in diagnose(replace(HEALTHY, alerts=(fall,))).next_steps[0]


def test_of_a_mixture_of_experts_the_routing_is_named() -> None:
    everywhere = DiagnosisCause(
        name="mismatch_everywhere", sentence="It looks like weights of another step.", source="lint",
        certainty="possible", explains=False, what_to_do="Run the doctor.",
    )  # fmt: skip
    high = replace(HEALTHY, k3=SteppedValues(range(10, 50), [0.2] * 40), causes=(everywhere,))
    found = diagnose(replace(high, model_kind="moe"))
    assert "other experts for some tokens (routing) make it too." in found.causes[0].sentence
    assert found.next_steps[0].startswith("Compare the experts that engine and trainer choose")
    assert found.next_steps[0].endswith("Run the doctor.")
    assert "routing" not in diagnose(high).causes[0].sentence


def test_a_mismatch_whose_cause_is_unknown_is_no_consequence_of_itself() -> None:
    everywhere = DiagnosisCause(
        name="mismatch_everywhere", sentence="It is alike everywhere.", source="lint", certainty="possible",
        explains=False, evidence={"first_step": 20, "steps": 20},
    )  # fmt: skip
    high = replace(HEALTHY, k3=SteppedValues(range(10, 50), [2.0] * 40), causes=(everywhere,))
    rise = replace(RISE, evidence={"cause": "mismatch", "onset_step": 20})
    found = diagnose(replace(high, alerts=(rise, FELL)))
    assert [each.sentence for each in found.causes] == ["It is alike everywhere."]
    later = replace(everywhere, evidence={"first_step": 30, "steps": 10})
    found = diagnose(replace(high, alerts=(rise, FELL), causes=(later,)))
    assert found.causes[0].sentence.endswith("a consequence.")


def test_a_rate_of_0_stands_in_a_healthy_headline() -> None:
    rates = SteppedValues(range(40), [1e-6] * 20 + [0.0] * 20)
    found = diagnose(replace(HEALTHY, rates=rates))
    assert found.verdict == "healthy"
    assert "but the learning rate is 0 since step 20" in found.headline


def test_lengths_that_grew_before_the_newest_steps_are_named() -> None:
    grew = PastAlert("length_growth_with_reward", "info", 37, True, "Watching.", evidence={"baseline_length": 30.0})
    late, count = [each + 100 for each in range(64)], 64
    history = replace(
        HEALTHY, observed_step=163, k3=SteppedValues(late, [2e-5] * count), reward=SteppedValues(late, [0.9] * count),
        length=SteppedValues(late, [450.0] * count), alerts=(grew,),
    )  # fmt: skip
    assert diagnose(history).headline == (
        "Healthy: the mismatch (k3) is 2.0e-5 in the newest 10 measured steps; the reward is 0.90; but responses have "
        "grown × 15 since step 37."
    )
    assert "grown" not in diagnose(replace(history, alerts=())).headline


def test_single_tokens_that_are_left_out_are_not_told_of_a_fall() -> None:
    few = replace(SHIFT, name="placeholder_log_probs", title="some values are placeholders")
    assert "placeholders" not in diagnose(replace(HEALTHY, alerts=(COLLAPSE,), causes=(few,))).headline
    assert "placeholders" in diagnose(replace(HEALTHY, alerts=(RISE,), causes=(few,))).headline


def test_of_two_causes_a_headline_names_the_one_that_fits() -> None:
    alert = replace(RISE, rule="mismatch_critical", severity="critical", evidence={"cause": "mismatch"})
    k3 = SteppedValues(list(STEPS), [36.0] * 40)
    for more, is_told in (("a second fault", True), ("a fault that needs many words " * 3, False)):
        causes = (SHIFT, replace(SHIFT, name="other", title=more))
        headline = diagnose(replace(HEALTHY, k3=k3, alerts=(alert,), causes=causes)).headline
        assert "the data show: they are shifted" in headline
        assert (more in headline) == is_told


def test_a_headline_has_at_most_160_characters_and_the_news_first() -> None:
    long = replace(SHIFT, title="the two are shifted " + "by one token each " * 4)
    for changes in ({"alerts": (RISE, COLLAPSE)}, {}, {"k3": SteppedValues()}):
        found = diagnose(replace(HEALTHY, causes=(long, replace(FLAT, title=long.title)), **changes))
        assert len(found.headline) <= 160
        assert found.headline.endswith(".")


def test_a_symbol_at_the_start_of_a_sentence_keeps_its_letter() -> None:
    missing = (MissingData(sentence="μ was truncated"), MissingData(sentence="k3 is not logged"))
    lines = diagnose(replace(HEALTHY, unlogged=(*missing, MissingData(sentence="no lag")))).parts()["Missing"]
    assert lines == ["μ was truncated.", "k3 is not logged.", "No lag."]


def test_alerts_of_one_cause_are_one_line_and_one_thing_to_do() -> None:
    rules = ("mismatch_warning", "chi2_high", "tail_heavy", "absolute_difference", "mean_ratio_off", "gradient_rise")
    causes = ("mismatch",) * 4 + ("sampling", "gradient")
    alerts = tuple(
        replace(RISE, rule=rule, why=f"{rule}.", what_to_do=f"Look at {rule}.", evidence={"cause": cause})
        for rule, cause in zip(rules, causes, strict=True)
    )
    found = diagnose(replace(HEALTHY, alerts=alerts))
    assert "more" not in found.headline
    (line,) = found.parts()["What happened, in order"]
    assert line.startswith("Step 20: mismatch warning. mismatch_warning. With it: absolute difference, chi2 high, ")
    assert line.endswith(" and 1 more.")
    assert len(found.events) == len(alerts)
    assert found.next_steps[0] == "Look at mismatch_warning."
    assert not any("gradient" in each for each in found.next_steps)


def test_a_reward_that_is_always_zero_has_not_only_not_fallen() -> None:
    zero = SteppedValues(list(STEPS), [0.0] * 40)
    assert diagnose(replace(HEALTHY, reward=zero)).headline.endswith("; the reward is 0 in every step.")
    cut = PastAlert(
        "truncation_high", "warning", 9, True,
        "More than half of the responses are cut at the length cap, so their mean length cannot show a surge.",
        evidence={"onset_step": 5},
    )  # fmt: skip
    found = diagnose(replace(HEALTHY, reward=zero, alerts=(cut,)))
    assert found.headline == (
        "Warning since step 5: more than half of the responses are cut at the length cap, so their mean length cannot "
        "show a surge; the reward is 0 in every step."
    )


def test_the_cause_has_room_in_the_headline() -> None:
    k3 = SteppedValues(list(STEPS), [0.21] * 40)
    alert = replace(RISE, severity="critical", step=3, evidence={"cause": "mismatch", "onset_step": 0})
    for title in (CHECKS["raw_log_probs"].title, CHECKS["tokens_without_engine"].title):
        found = diagnose(replace(HEALTHY, k3=k3, alerts=(alert,), causes=(replace(SHIFT, title=title),)))
        assert f"the data show: {title.partition(' (')[0]}" in found.headline
        assert len(found.headline) <= 160


@pytest.mark.parametrize("name", ["aborted_responses", "tokens_not_sampled", "same_response"])
def test_a_run_with_a_fault_of_the_data_is_not_healthy(name: str) -> None:
    aborted = DiagnosisCause(
        name=name,
        title="35 % of the responses were ended by an abort",
        sentence="",
        source="lint",
        explains=False,
    )
    found = diagnose(replace(HEALTHY, causes=(aborted,)))
    assert found.verdict == "warning"
    assert found.headline == (
        "Warning: 35 % of the responses were ended by an abort; the mismatch (k3) is 2.0e-5 in the newest 10 measured "
        "steps; the reward, 0.90, is near its best."
    )


@pytest.mark.parametrize(("title", "verdict"), [(ALIKE, "warning"), (COPIES, "warning"), (DUPLICATED.title, "healthy")])
def test_samples_that_are_all_alike_make_a_run_unhealthy(title: str, verdict: str) -> None:
    found = replace(SHIFT, name="duplicated_rollouts", title=title, explains=False)
    assert diagnose(replace(HEALTHY, causes=(found,))).verdict == verdict


def test_single_bad_steps_that_are_over_are_told_in_place_of_their_alerts() -> None:
    k3 = [2e-4] * 36 + [0.8, 0.8, 0.8, 2e-4]
    heavy = replace(RISE, rule="tail_heavy", severity="critical", step=38,
                    evidence={"cause": "mismatch", "onset_step": 36})  # fmt: skip
    found = diagnose(replace(HEALTHY, k3=SteppedValues(list(STEPS), k3), alerts=(heavy,)))
    assert found.headline == "Critical: k3 was about 0.80 in steps 36 to 38, healthy since."
    assert found.short == "Mismatch: k3 was about 0.80 in steps 36 to 38, healthy since."


def test_a_single_step_is_no_event_beside_a_graver_alert_on_the_mismatch() -> None:
    step = replace(RISE, rule="mismatch_step", severity="info", evidence={"cause": "mismatch"})
    grave = replace(RISE, evidence={"cause": "mismatch"})
    assert [each.rule for each in diagnose(replace(HEALTHY, alerts=(step,))).events] == ["mismatch_step"]
    (event,) = diagnose(replace(HEALTHY, alerts=(step, grave))).events
    assert (event.rule, "mismatch step" in event.sentence) == ("mismatch_rise", False)


def test_the_lint_says_of_invalid_values_what_their_alert_does_not() -> None:
    alert = replace(RISE, rule="log_probs_not_finite", evidence={}, why="Some log-probs are NaN or placeholders.")
    cause = replace(
        SHIFT, name="non_finite_log_probs", title="all trainer_log_probs are NaN or infinite", what_to_do="Mend it."
    )
    found = diagnose(replace(HEALTHY, k3=SteppedValues(list(range(20)), [2e-5] * 20), alerts=(alert,), causes=(cause,)))
    assert found.headline == "Warning since step 20: all trainer_log_probs are NaN or infinite."
    assert (found.next_steps[0], alert.what_to_do in found.next_steps) == ("Mend it.", False)


def test_a_fault_of_the_data_is_told_before_the_lengths() -> None:
    alert = replace(RISE, rule="truncation_high", evidence={"cause": "length"}, why="More than half are cut.")
    title = "tokens of id 3 were not sampled by the model"
    fault = replace(SHIFT, name="tokens_not_sampled", title=title, explains=False, evidence={"first_step": 4})
    assert diagnose(replace(HEALTHY, alerts=(alert,), causes=(fault,))).headline.startswith(
        f"Warning since step 4: {title}; more than half are cut"
    )
    graver = replace(alert, rule="mismatch_warning", evidence={"cause": "mismatch"})
    assert title not in diagnose(replace(HEALTHY, alerts=(graver,), causes=(fault,))).headline.partition(";")[0]


def test_a_clause_that_does_not_fit_leaves_out_what_it_adds() -> None:
    title = (
        f"k3 averages 1.49 in the 24 rollouts with prompts longer than about 14 tokens, and 3.6e−4 {'elsewhere ' * 3}"
    )
    place = replace(SHIFT, name="mismatch_by_place", title=title)
    high = replace(HEALTHY, k3=SteppedValues(list(STEPS), [0.83] * 40), alerts=(RISE,), causes=(place,))
    assert "; k3 averages 1.49 in the 24 rollouts with prompts longer than about 14 tokens" in diagnose(high).headline


def test_responses_that_are_all_cut_are_told_with_the_rewards_that_follow() -> None:
    alert = replace(RISE, rule="truncation_high", evidence={"cause": "length"}, why="More than half are cut.")
    cut = replace(SHIFT, name="all_truncated", title="every response was cut off", explains=False)
    assert diagnose(replace(HEALTHY, alerts=(alert,), causes=(cut, replace(FLAT, explains=False)))).headline == (
        "Warning since step 20: every response was cut off; no group has a spread; the mismatch (k3) is 2.0e-5 in the "
        "newest 10 measured steps."
    )


@pytest.mark.parametrize(
    ("rates", "cause"),
    [
        (SteppedValues(range(1, 41), [0.0] * 40), "mismatch_without_updates"),
        (SteppedValues(range(1, 41), [0.0] * 30 + [1e-6] * 10), "weights_not_delivered"),
        # The rate of the first steps, in which k3 grew, is not known.
        (SteppedValues(range(20, 41), [0.0] * 21), "weights_not_delivered"),
        (SteppedValues(), "weights_not_delivered"),
    ],
    ids=["0", "a warm-up", "0 of late", "not logged"],
)
def test_growth_is_blamed_on_updates_unless_the_rate_is_known_to_be_0(rates: SteppedValues, cause: str) -> None:
    k3 = [2e-4 * min(1.3**step, 60.0) for step in range(40)]
    grown = replace(HEALTHY, k3=SteppedValues(range(1, 41), k3), alerts=(RISE,), rates=rates)
    assert cause in [each.name for each in diagnose(grown).causes]


def test_advantages_that_are_no_numbers_make_a_warning_whatever_the_mismatch() -> None:
    cause = replace(FLAT, name="non_finite_values", title="100 % of the values of advantage are NaN or infinite")
    found = diagnose(replace(HEALTHY, causes=(cause,)))
    assert found.verdict == "warning"
    assert "100 % of the values of advantage are NaN or infinite" in found.headline


def test_a_change_that_was_announced_is_told_with_the_reward_that_fell_with_it() -> None:
    change = ChangeRecord(step=20, attempt=1, kind="curriculum", before="easy", after="hard", rebaseline=True)
    reward = SteppedValues(list(STEPS), [0.8] * 20 + [0.42] * 20)
    found = diagnose(replace(HEALTHY, reward=reward, changes=(change,)))
    assert found.headline.endswith("; the reward is 0.42 (0.80 before the change at step 20).")
    assert found.parts()["What happened, in order"] == ["Step 20: curriculum easy → hard."]
    earlier = replace(change, step=5)
    assert "before the change" not in diagnose(replace(HEALTHY, reward=reward, changes=(earlier,))).headline


def test_a_fault_of_the_learning_signal_that_was_there_before_the_fall_is_its_cause() -> None:
    fault = replace(
        FLAT, name="advantages_against_rewards", title="advantages have the opposite sign of their rewards",
        explains=False, what_to_do="Look for a sign.", evidence={"steps": 20, "first_step": 11},
    )  # fmt: skip
    history = replace(HEALTHY, alerts=(COLLAPSE,), causes=(fault,), checkpoints=(5, 15), resumes=(10,))
    found = diagnose(history)
    assert found.headline == (
        "Critical since step 11: the reward fell from 0.85 to 0.03 (found at step 30); the data show: advantages have "
        "the opposite sign of their rewards since step 11."
    )
    assert found.next_steps[0] == (
        "Stop, or go back to the checkpoint of step 5, the newest from before step 11. Look for a sign."
    )
    assert found.parts()["What happened, in order"][0] == "Step 10: the run was resumed."
    later = replace(fault, evidence={"steps": 5, "first_step": 30})
    assert "the data show" not in diagnose(replace(history, causes=(later,))).headline
    assert diagnose(replace(HEALTHY, causes=(fault,))).verdict == "warning"


def test_a_jump_is_told_with_the_change_of_its_step() -> None:
    k3 = SteppedValues(list(STEPS), [2e-4 + 1e-6 * (each % 3) for each in range(20)] + [5e-2] * 20)
    change = ChangeRecord(step=20, attempt=1, kind="other", before="none", after="fp8", note="rollout", rebaseline=True)
    found = diagnose(replace(HEALTHY, k3=k3, changes=(change,)))
    assert ", with a change: announced change none → fp8 (rollout)" in found.causes[0].title
    assert found.next_steps[0].startswith("Undo the change of step 20 (announced change none → fp8 (rollout))")
    other = diagnose(replace(HEALTHY, k3=k3, changes=(replace(change, step=19),)))
    assert other.next_steps[0].startswith("Look at what changed at step 20")


def test_a_mismatch_that_jumps_after_the_reward_fell_is_a_consequence() -> None:
    k3 = SteppedValues(list(STEPS), [2e-4 + 1e-6 * (each % 3) for each in range(31)] + [5e-2] * 9)
    found = diagnose(replace(HEALTHY, k3=k3, alerts=(COLLAPSE,)))
    (jump,) = [each for each in found.causes if each.name == "mismatch_jump"]
    assert jump.sentence.endswith("It began after the run went wrong at step 25: a consequence.")
    assert "rose ×" not in found.headline
    before = diagnose(replace(HEALTHY, k3=k3, alerts=(replace(COLLAPSE, step=39, evidence={"onset_step": 35}),)))
    assert "rose ×" in before.headline


def test_what_few_steps_show_stands_below_what_most_show() -> None:
    seldom = replace(SHIFT, name="mismatch_after_id", title="it begins at one id", evidence={"steps": 1})
    place = replace(SHIFT, name="mismatch_by_place", title="k3 is in 24 rollouts", evidence={"steps": 7})
    assert [each.name for each in diagnose(replace(HEALTHY, causes=(seldom, place))).causes] == [
        "mismatch_by_place",
        "mismatch_after_id",
    ]
    possible = replace(place, name="temperature_of_trainer", title="it forgets", certainty="possible")
    headline = diagnose(replace(HEALTHY, alerts=(COLLAPSE,), causes=(seldom, possible))).headline
    assert "probably it forgets" in headline
    assert "the data show" not in headline
    often = replace(seldom, evidence={"steps": 4})
    assert diagnose(replace(HEALTHY, causes=(often, place))).causes[0].name == "mismatch_after_id"
