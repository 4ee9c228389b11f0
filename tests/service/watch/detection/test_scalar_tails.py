"""A run that logs scalars only is watched as one with rollouts, whatever order its scalars arrive in."""

from dataclasses import replace
from itertools import pairwise

import httpx
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.runs.runs import RunUpdate, update_run
from foreshock_service.watch.detection.history import close_scalar_tails
from tests.service.sending import start_run
from tests.service.watch.recorded import LENGTH, RecordedRun

# verl's names. The lengths triple from step 41 on, and the gradient norm rises with them.
STEPS = range(1, 61)
ROWS: dict[int, dict[str, float | None]] = {
    step: {
        "response_length/mean": (100.0 if step <= 40 else 300.0) + step % 3,
        "actor/grad_norm": (0.4 if step <= 40 else 3.0) + 0.01 * (step % 4),
        "critic/rewards/mean": 0.5,
        "perf/throughput": 1000.0 * step,
    }
    for step in STEPS
}


def closed(run: RecordedRun) -> list[int]:
    """Return the steps up to which the detectors got: the newest one only is known, as the last snapshot."""
    return [snapshot.step for snapshot in run.snapshots()]


def found(run: RecordedRun) -> list[tuple[str, int, float, str]]:
    return [(alert.rule, alert.step, alert.value, alert.state) for alert in run.alerts() if alert.state != "retracted"]


def test_step_closes_when_scalars_of_a_later_step_come(recorded: RecordedRun) -> None:
    recorded.log(1, {"reward": 1.0})
    recorded.log(1, {"entropy": 1.0})
    assert closed(recorded) == []
    recorded.log(2, {"perf/throughput": 1.0})
    assert closed(recorded) == []
    recorded.log(5, {"reward": 1.0})
    assert closed(recorded) == [1]
    recorded.log(3, {"entropy": 1.0})
    assert closed(recorded) == [1, 3]


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(order=st.permutations(list(range(12))), resume=st.integers(0, 12))
def test_order_and_resume_do_not_change_the_result(recorded: RecordedRun, order: list[int], resume: int) -> None:
    def play(key: str, steps: list[int]) -> tuple[RecordedRun, list[tuple[str, int, float, str]]]:
        run = RecordedRun(recorded.database).begin(key)
        for step in steps:
            run.log(step, ROWS[step + 34])
        alerts = found(run)
        run.resume(resume)
        for step in [each for each in steps if each >= resume]:
            run.log(step, {name: 2.0 * (value or 0.0) for name, value in ROWS[step + 34].items()})
        return run, alerts

    numbers = "-".join(map(str, order))
    one, alerts = play(f"a-{numbers}-{resume}", sorted(order))
    other, alerts_of_other = play(f"b-{numbers}-{resume}", order)
    assert (other.newest_state(), alerts_of_other) == (one.newest_state(), alerts)
    scales = [one.advice().scale(step) for step in range(300)]
    assert all(later <= earlier for earlier, later in pairwise(scales))


def test_declared_names_override_the_well_known_ones(recorded: RecordedRun) -> None:
    other = RecordedRun(recorded.database).begin("declared", scalar_names={"response_length/mean": "perf/throughput"})
    for step in range(1, 45):
        row = {"response_length/mean": 100.0 if step <= 30 else 300.0, "perf/throughput": 50.0}
        recorded.log(step, row)
        other.log(step, row)
    assert [rule for rule, *_ in found(recorded)] == ["length_surge"]
    assert found(other) == []
    # Without the declaration the history is read again.
    other.database.write(
        lambda session: update_run(session, other.events, UNRESTRICTED, other.run, RunUpdate(scalar_names=None))
    )
    assert found(other) == found(recorded)


def test_rollouts_take_over_from_scalars(recorded: RecordedRun) -> None:
    for step in range(1, 45):
        recorded.log(step, {"response_length/mean": 100.0 if step <= 30 else 300.0})
    assert [rule for rule, *_ in found(recorded)] == ["length_surge"]
    recorded.close(45, {LENGTH: 100.0})
    assert found(recorded) == []
    assert closed(recorded) == [45]


def test_newest_step_closes_after_the_grace_time_or_when_the_run_ends(http: httpx.Client, app: FastAPI) -> None:
    context, run, ended = app.state.context, start_run(http, "silent"), start_run(http, "ended")
    for each in (run, ended):
        for step in (1, 2):
            each.put_scalars(step, {"reward": 1.0}).raise_for_status()
        assert each.get("lr-advice").json()["observed_step"] == 1
    http.patch(f"/v1/runs/{ended.run}", json={"state": "finished"}).raise_for_status()
    assert close_scalar_tails(context) == 1
    assert ended.get("lr-advice").json()["observed_step"] == 2
    assert run.get("lr-advice").json()["observed_step"] == 1
    short = replace(context, settings=context.settings.model_copy(update={"step_grace_seconds": 1e-6}))
    assert close_scalar_tails(short) == 1
    assert close_scalar_tails(short) == 0
    assert run.get("lr-advice").json()["observed_step"] == 2
    # Late scalars of a step that the grace time closed, then the next step.
    run.put_scalars(2, {"entropy": 0.5}).raise_for_status()
    run.put_scalars(3, {"entropy": 0.5}).raise_for_status()
    assert run.get("lr-advice").json()["observed_step"] == 2


def test_invalid_declaration_is_refused(http: httpx.Client) -> None:
    for names, message in (
        ({"rewrd": "x"}, "did you mean"),
        ({"reward": "x", "rollout:reward_mean": "y"}, "same quantity"),
    ):
        answer = http.post("/v1/runs", json={"key": "k", "scalar_names": names})
        assert answer.status_code == 422
        assert message in answer.text
