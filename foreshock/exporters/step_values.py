"""The values of closed steps, from the service's measurements, alerts and advice."""

from collections.abc import Iterable, Sequence

import numpy as np

from foreshock.api.watch import STANDING, AlertRecord
from foreshock.client.columns import Measurements
from foreshock.client.reader import Reader
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.exporters.exporter import StepValues
from foreshock.learning_rate.advice import Advice
from foreshock.severity import SEVERITIES


class StepSource:
    """Reads closed steps of one attempt from the service."""

    def __init__(self, reader: Reader, run_id: str, attempt: int, measures: Sequence[str]) -> None:
        self._reader = reader
        self._run = run_id
        self._attempt = attempt
        self._measures = tuple(measures)
        self._rules: set[str] = set()

    def read(self, first: int, last: int) -> list[StepValues]:
        """Return the closed steps with first ≤ step ≤ last, in step order. Raises ServiceError."""
        measured = self._reader.measurements(
            self._run,
            measures=self._measures,
            comparisons=(TRAINER_ROLLOUT, STEP_ROW),
            from_step=first,
            to_step=last,
            attempt=self._attempt,
        )
        if not measured.columns.rows:
            return []
        alerts = tuple(self._reader.alerts(self._run, states=(*STANDING, "resolved")))
        advice = self._reader.advice(self._run).advice
        return step_values(
            measured, alerts, advice if advice.attempt == self._attempt else None, self._measures, self._rules
        )


def step_values(
    measured: Measurements,
    alerts: Iterable[AlertRecord],
    advice: Advice | None,
    measures: Sequence[str],
    rules: set[str],
) -> list[StepValues]:
    """Return the values of each measured step, in step order.

    `rules` has the rules that fired so far: each has a series that is 1 while it fires, else 0.
    """
    columns, alerts = measured.columns, tuple(alerts)
    values: dict[int, dict[str, float]] = {int(step): {} for step in np.unique(columns["step"])}
    for name in measures:
        for step, value in zip(columns["step"].tolist(), columns.get(name, ()), strict=False):
            if np.isfinite(value):
                values[step][name] = float(value)
    missing = {each.step: float(each.expected_shards - each.shards) for each in measured.incomplete_steps}
    rules |= {alert.rule for alert in alerts}
    for step, of_step in values.items():
        of_step["missing_shards"] = missing.get(step, 0.0)
        firing = [alert for alert in alerts if _fires_at(alert, step)]
        for severity in SEVERITIES:
            of_step[f"alerts/{severity}"] = float(sum(alert.severity == severity for alert in firing))
        named = {alert.rule for alert in firing}
        of_step |= {f"alert/{rule}": float(rule in named) for rule in rules}
        if advice is not None:
            of_step["lr_scale"] = advice.scale(step)
            of_step["lr_scale_advised"] = advice.advised_scale(step)
    return [StepValues(step, of_step) for step, of_step in values.items()]


def _fires_at(alert: AlertRecord, step: int) -> bool:
    """Return True if the alert fires at `step`; one that a person resolved has no step at which it cleared."""
    if alert.step > step:
        return False
    return step < alert.cleared_step if alert.cleared_step is not None else alert.state in STANDING
