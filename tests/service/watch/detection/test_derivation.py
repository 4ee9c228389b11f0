"""Alerts follow the active history, whatever order it arrived in; late data takes back what it contradicts."""

import pytest

from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.watch import alerts
from foreshock_service.watch.detection.states import NEWEST_STATES, STEPS_OF_A_BLOCK
from tests.service.watch.recorded import K3, LENGTH, RecordedRun

SURGE = [100.0] * 10 + [260.0] * 8
STEPS = range(31, 49)


def test_surge_opens_an_alert_and_sets_the_schedule(recorded: RecordedRun) -> None:
    recorded.close_all({LENGTH: SURGE}, STEPS)
    (alert,) = recorded.alerts()
    assert (alert.rule, alert.step, alert.state, alert.severity) == ("length_surge", 44, "open", "critical")
    assert (alert.value, alert.threshold, alert.moves_learning_rate) == (260.0, 200.0, True)
    assert alert.evidence["surge_step"] == 41
    assert alert.why
    assert alert.what_to_do
    state = recorded.advice()
    assert recorded.decisions() == ["surge"]
    assert state.schedule is not None
    assert (state.schedule.surge_step, state.last.step) == (41, 45)


def test_announced_change_is_no_surge_whether_it_is_announced_before_or_afterwards(recorded: RecordedRun) -> None:
    recorded.announce(41, "length_cap")
    recorded.close_all({LENGTH: SURGE}, STEPS)
    assert recorded.alerts() == []
    late = RecordedRun(recorded.database).begin("announced late")
    late.close_all({LENGTH: SURGE}, STEPS)
    assert late.advice().schedule is not None
    late.announce(41, "length_cap")
    assert set(late.states().values()) == {"retracted"}
    assert late.advice().schedule is None
    assert late.newest_state() == recorded.newest_state()


def test_change_of_a_superseded_step_and_of_a_step_to_come_change_nothing_now(recorded: RecordedRun) -> None:
    recorded.announce(41, "curriculum")
    recorded.close_all({LENGTH: SURGE[:10]}, STEPS[:10])
    recorded.resume(41)
    recorded.close_all({LENGTH: SURGE[10:]}, STEPS[10:])
    recorded.announce(1_000, "curriculum")
    assert recorded.states() == {("length_surge", 44): "open"}


def test_baselines_begin_at_the_first_closed_step_after_the_change(recorded: RecordedRun) -> None:
    recorded.announce(40, "data_mixture")
    # No step 40 or 41: rollouts of the new data come at 42.
    steps = [step for step in range(30, 60) if step not in (40, 41)]
    recorded.close_all({LENGTH: [100.0] * 10 + [260.0] * 18}, steps)
    assert recorded.alerts() == []


def test_late_data_retracts_an_alert_and_ends_the_schedule(recorded: RecordedRun) -> None:
    recorded.close_all({LENGTH: SURGE}, STEPS)
    for step in range(42, 46):
        # The rest of each step's rollouts was short.
        recorded.close(step, {LENGTH: 120.0})
    assert recorded.states()[("length_surge", 44)] == "retracted"
    assert set(recorded.states().values()) == {"retracted"}
    assert recorded.advice().schedule is None
    assert recorded.decisions()[-1] == "retract"
    # And back: the same alert opens again.
    for step in range(42, 46):
        recorded.close(step, {LENGTH: 260.0})
    assert recorded.states()[("length_surge", 44)] == "open"
    assert recorded.advice().schedule is not None


def test_cleared_alert_is_resolved_and_late_data_opens_it_again(recorded: RecordedRun) -> None:
    recorded.close_all({K3: [0.2] * 6 + [1e-4] * 4}, range(1, 11))
    alert = next(alert for alert in recorded.alerts() if alert.rule == "mismatch_critical")
    assert (alert.step, alert.state, alert.cleared_step, alert.changed_by) == (5, "resolved", 9, "detector")
    recorded.close(8, {K3: 0.2})
    alert = next(alert for alert in recorded.alerts() if alert.rule == "mismatch_critical")
    assert (alert.state, alert.cleared_step) == ("open", None)


def test_alert_from_before_the_replayed_steps_clears(recorded: RecordedRun) -> None:
    recorded.close_all({K3: [0.2] * 60 + [1e-4] * 3}, range(1, 64))
    alert = next(alert for alert in recorded.alerts() if alert.rule == "mismatch_critical")
    assert (alert.step, alert.state, alert.cleared_step) == (5, "resolved", 63)


def test_alert_resolved_by_a_person_stays_resolved_after_a_replay(recorded: RecordedRun) -> None:
    recorded.close_all({K3: [0.2] * 6}, range(1, 7))
    alert = next(alert for alert in recorded.alerts() if alert.rule == "mismatch_critical")
    recorded.database.write(lambda session: alerts.answer(session, UNRESTRICTED, recorded.run, alert.id, "resolve"))
    recorded.close(2, {K3: 0.3})
    assert recorded.states()[("mismatch_critical", 5)] == "resolved"


def test_alert_version_grows_with_changes_only(recorded: RecordedRun) -> None:
    recorded.close_all({K3: [1e-4] * 3 + [0.2] * 6 + [1e-4] * 6}, range(1, 16))
    versions = recorded.alert_versions
    assert versions == sorted(versions)
    assert versions[2] == 0
    before = versions[-1]
    recorded.close(15, {K3: 1e-4})
    assert recorded.alert_versions[-1] == before


@pytest.mark.slow
def test_late_step_replays_from_the_snapshot_before_it(recorded: RecordedRun) -> None:
    steps = 3 * STEPS_OF_A_BLOCK
    recorded.close_all({LENGTH: [100.0] * steps}, range(1, steps + 1))
    kept = [(snapshot.step, snapshot.milestone) for snapshot in recorded.snapshots()]
    assert [step for step, milestone in kept if milestone] == [1, 25, 50, 75]
    assert [step for step, _ in kept[-NEWEST_STATES:]] == [72, 73, 74, 75]
    assert len(kept) < 4 + NEWEST_STATES
    before = {snapshot.step: snapshot.state for snapshot in recorded.snapshots()}
    recorded.close(60, {LENGTH: 101.0})
    again = {snapshot.step: snapshot.state for snapshot in recorded.snapshots()}
    assert again.keys() == before.keys()
    assert [step for step in before if again[step] != before[step]] == [72, 73, 74, 75]


def test_resume_supersedes_alerts_and_decisions(recorded: RecordedRun) -> None:
    recorded.close_all({LENGTH: SURGE}, STEPS)
    recorded.resume(40)
    assert recorded.states() == {("length_surge", 44): "resolved"}
    assert recorded.alerts()[0].changed_by == "rewind"
    state = recorded.advice()
    assert (state.attempt, state.schedule, state.revision) == (2, None, 2)
    # What still comes of the old tail changes nothing.
    recorded.close(47, {LENGTH: 9000.0}, attempt=1)
    assert recorded.snapshots()[-1].step == 39
    recorded.close_all({LENGTH: [100.0] * 4 + [300.0] * 8}, range(40, 52))
    assert [(alert.attempt, alert.step, alert.state) for alert in recorded.alerts()] == [
        (1, 44, "resolved"),
        (2, 47, "open"),
    ]
    state = recorded.advice()
    assert state.schedule is not None
    assert (state.schedule.surge_step, state.revision) == (44, 3)


def test_resume_after_the_surge_keeps_alert_and_schedule(recorded: RecordedRun) -> None:
    recorded.close_all({LENGTH: SURGE}, STEPS)
    recorded.resume(47)
    assert recorded.states() == {("length_surge", 44): "open"}
    state = recorded.advice()
    assert state.attempt == 2
    assert state.schedule is not None
    assert recorded.snapshots()[-1].step == 46
