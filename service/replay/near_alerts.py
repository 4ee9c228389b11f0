"""Steps near an open alert: they are probed first."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, select

from foreshock_service.platform.database.tables import Alert

ALERT_WINDOW_STEPS = 10
"""Steps before and after an alert's own step that are near it. In an alarm, weights are wanted every ten steps."""


def is_near_open_alert(run_id: Any, step: Any) -> ColumnElement[bool]:
    """Return the condition for a step near an open or acknowledged alert of its run, given values or columns."""
    near = Alert.step.between(step - ALERT_WINDOW_STEPS, step + ALERT_WINDOW_STEPS)
    return select(Alert.id).where(Alert.run_id == run_id, Alert.state.in_(("open", "acknowledged")), near).exists()
