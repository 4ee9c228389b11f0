"""Which steps keep their tokens: properties of the rules, over random runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreshock_service.maintenance.retention import RetentionRules, purged_steps

STEPS = st.lists(st.integers(0, 300), unique=True, max_size=120).map(sorted)
RULES = st.builds(
    RetentionRules,
    last_steps=st.none() | st.integers(1, 60),
    every_steps=st.none() | st.integers(1, 40),
    alert_steps=st.integers(0, 10),
)
ALERTS = st.sets(st.integers(0, 300), max_size=6)


@given(STEPS, ALERTS, RULES)
def test_kept_steps_are_the_last_ones_every_nth_and_those_around_alerts(
    steps: list[int], alerts: set[int], rules: RetentionRules
) -> None:
    newest = max(steps, default=0)
    purged = purged_steps(steps, newest, alerts, rules)
    assert purged == sorted(set(purged) & set(steps))
    for step in steps:
        last = rules.last_steps is None or newest - step < rules.last_steps
        nth = rules.every_steps is not None and step % rules.every_steps == 0
        near = any(abs(step - alert) <= rules.alert_steps for alert in alerts)
        assert (step not in purged) == (last or nth or near)


@given(STEPS, ALERTS, RULES)
def test_purging_in_two_rounds_purges_what_one_round_does(
    steps: list[int], alerts: set[int], rules: RetentionRules
) -> None:
    newest = max(steps, default=0)
    once = purged_steps(steps, newest, alerts, rules)
    left = [step for step in steps if step not in once]
    assert purged_steps(left, newest, alerts, rules) == []


@given(STEPS, ALERTS, RULES, st.integers(0, 50))
def test_a_purged_step_stays_purged_while_the_run_goes_on(
    steps: list[int], alerts: set[int], rules: RetentionRules, later: int
) -> None:
    newest = max(steps, default=0)
    assert set(purged_steps(steps, newest, alerts, rules)) <= set(purged_steps(steps, newest + later, alerts, rules))


@given(STEPS, ALERTS)
def test_without_a_number_of_last_steps_nothing_is_purged(steps: list[int], alerts: set[int]) -> None:
    assert purged_steps(steps, max(steps, default=0), alerts, RetentionRules(every_steps=7, alert_steps=0)) == []
