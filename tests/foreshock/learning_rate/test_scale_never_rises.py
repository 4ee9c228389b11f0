"""The advised scale over random histories, with late steps and polls, rises only slowly, by the loop."""

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreshock.api.records import parse, to_json
from foreshock.diagnosis import detectors
from foreshock.diagnosis.default_rules import default_rules
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import LENGTH_KEY, REWARD_KEY
from foreshock.learning_rate.control_loop import LARGEST_RISE, LoopSettings
from foreshock.learning_rate.decisions import STEPS_OF_A_RISE, Decision, Observation, decide, fold
from foreshock.learning_rate.length_decay import ScheduleSettings

# One rule holds the learning rate. The rules change within the histories, by restarts with another file.
HOLDING = tuple(replace(rule, effect="hold") if rule.name == "mismatch_rise" else rule for rule in default_rules())


def configured(floor: float, step: int) -> detectors.WarningConfiguration:
    """Return the configuration in force at a step; ``floor`` is that of the loop, and of the last schedule."""
    loop = LoopSettings(floor=floor)
    if step < 50:
        return detectors.WarningConfiguration(loop=loop)
    if step < 90:
        first = ScheduleSettings(multiplier=0.5, factor=0.8, floor=0.3, minimum_period=4)
        return detectors.WarningConfiguration(rules=HOLDING, schedule=first, loop=loop)
    return detectors.WarningConfiguration(schedule=ScheduleSettings(minimum_period=6, floor=floor), loop=loop)


LEVELS = st.lists(
    st.tuples(
        st.integers(3, 20),
        st.sampled_from([200.0, 500.0, 1200.0, 4000.0]),
        st.sampled_from([0.1, 0.5, 0.9]),
        st.sampled_from([1e-4, 5e-2]),
    ),
    min_size=2,
    max_size=8,
)


def replay(
    values: dict[int, dict[str, float]],
    states: dict[int, detectors.WarningState],
    changed: int,
    configuration: detectors.WarningConfiguration,
) -> detectors.WarningState:
    """Return the state after the history; `states` are those after its steps, which hold before `changed`."""
    for step in [each for each in states if each >= changed]:
        del states[step]
    state = states[max(states)] if states else detectors.WarningState()
    for step in sorted(each for each in values if each >= changed):
        states[step] = state = detectors.advance(state, detectors.ClosedStep(step, values[step]), configuration)[0]
    return state


@settings(deadline=None, max_examples=20)
@given(LEVELS, st.integers(0, 12), st.integers(2, 30), st.sampled_from([0.02, 0.05, 0.1]), st.integers(31, 130))
# The loop is at its floor of 0.1 when a surge comes whose schedule has a floor of 0.3.
@example(
    [
        (9, 4000.0, 0.5, 1e-4), (18, 500.0, 0.1, 1e-4), (5, 200.0, 0.1, 5e-2), (18, 1200.0, 0.9, 1e-4),
        (18, 4000.0, 0.1, 5e-2), (20, 4000.0, 0.1, 5e-2),
    ],
    0,
    28,
    0.1,
    130,
)  # fmt: skip
# The surge is retracted while the loop is at a floor below the usual one.
@example([(65, 500.0, 0.5, 1e-4), (45, 1500.0, 0.5, 1e-1)], 0, 200, 0.02, 128)
def test_scale_of_consecutive_steps_rises_slowly_at_most(
    levels: list[tuple[int, float, float, float]], delay: int, late_every: int, floor: float, retracted: int
) -> None:
    rows = [
        {LENGTH_KEY: length * (1.0 + 0.02 * (index % 3)), REWARD_KEY: reward, K3: k3}
        for count, length, reward, k3 in levels
        for index in range(count)
    ]
    known: dict[int, dict[str, float]] = {}
    late: dict[int, dict[str, float]] = {}
    states: dict[int, detectors.WarningState] = {}
    log: list[Decision] = []
    given_out: list[float] = []
    for step, row in enumerate(rows, start=30):
        given_out.append(fold(log).scale(step))
        if step % late_every == 0:
            late[step] = row
        else:
            known[step] = row
        come = [each for each in late if each <= step - delay]
        known |= {each: late.pop(each) for each in come}
        if not known:
            continue
        # Late steps are inserted where they belong: the history from there on is derived again.
        configuration = configured(floor, step)
        first = 0 if step in (50, 90) else min([step, *come])
        state = replay(known, states, first, configuration)
        log = [parse(Decision, to_json(each)) for each in log]
        # Late data may retract a surge at any step, and bring it back.
        surge = None if retracted <= step < retracted + 10 else state.surge_step
        seen = Observation(
            1, max(known), step, surge, at_us=step,
            schedule=configuration.schedule,
            holds=detectors.holding_signals(state, configuration),
            loop=state.loop,
            loop_settings=configuration.loop,
        )  # fmt: skip
        log += decide(fold(log), seen)
    assert all(
        later <= earlier * math.exp(LARGEST_RISE * STEPS_OF_A_RISE) + 1e-12 for earlier, later in pairwise(given_out)
    )
    assert all(floor <= scale <= 1.0 for scale in given_out)
