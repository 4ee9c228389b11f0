"""Which steps keep their tokens: properties over random runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreshock_service.maintenance.retention import purged_steps

STEPS = st.lists(st.integers(0, 300), unique=True, max_size=120).map(sorted)
ALERTS = st.sets(st.integers(0, 300), max_size=6)
LAST, AROUND = st.integers(1, 60), st.integers(0, 10)


@given(STEPS, ALERTS, LAST, AROUND, st.integers(0, 50))
def test_kept_steps_are_the_last_ones_and_those_around_alerts(
    steps: list[int], alerts: set[int], last: int, around: int, later: int
) -> None:
    newest = max(steps, default=0)
    purged = purged_steps(steps, newest, alerts, last, around)
    assert purged == [
        step for step in steps if newest - step >= last and not any(abs(step - alert) <= around for alert in alerts)
    ]
    # A purged step stays purged while the run goes on.
    assert set(purged) <= set(purged_steps(steps, newest + later, alerts, last, around))
