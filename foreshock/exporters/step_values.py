"""The values of closed steps, from the service's measurements, alerts and advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from foreshock.client.connection import Query, QueryValue, ServiceConnection
from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.errors import Rejected, ServiceError, WrongService
from foreshock.exporters.exporter import StepValues
from foreshock.learning_rate.advice import Advice
from foreshock.severity import SEVERITIES

__all__ = ["StepSource", "step_values"]

_ALERTS = 200
"""Newest alerts that are read; a run has a few at a time."""


class StepSource:
    """Reads closed steps of one attempt from the service."""

    def __init__(self, connection: ServiceConnection, run_id: str, attempt: int, measures: Sequence[str]) -> None:
        self._connection = connection
        self._run = f"/v1/runs/{run_id}"
        self._attempt = attempt
        self._measures = tuple(measures)
        self._rules: set[str] = set()
        # An older service refuses measures that it does not know.
        self._names_measures = True

    def read(self, first: int, last: int) -> list[StepValues]:
        """Return the closed steps with first ≤ step ≤ last, in step order. Raises ServiceError."""
        query: list[tuple[str, QueryValue]] = [
            ("attempt", self._attempt), ("from_step", first), ("to_step", last),
            ("comparison", TRAINER_ROLLOUT), ("comparison", STEP_ROW),
        ]  # fmt: skip
        measurements = self._measurements(query)
        try:
            if not measurements["columns"]["step"]:
                return []
            alerts = self._alerts()
            advice = Advice.from_json(self._connection.get_json(f"{self._run}/lr-advice"))
            return step_values(
                measurements, alerts, advice if advice.attempt == self._attempt else None, self._measures, self._rules
            )
        except ServiceError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WrongService(
                f"{self._connection.url} sent an unexpected answer: {error!r}; check its release"
            ) from error

    def _measurements(self, query: list[tuple[str, QueryValue]]) -> Mapping[str, Any]:
        path = f"{self._run}/measurements"
        if self._names_measures:
            try:
                return dict(self._connection.get_json(path, [*query, *(("measure", name) for name in self._measures)]))
            except Rejected as error:
                if error.status != httpx.codes.UNPROCESSABLE_ENTITY:
                    raise
                self._names_measures = False
        return dict(self._connection.get_json(path, query))

    def _alerts(self) -> list[Mapping[str, Any]]:
        states: Query = [("state", "open"), ("state", "acknowledged"), ("state", "resolved"), ("limit", _ALERTS)]
        return list(self._connection.get_json(f"{self._run}/alerts", states)["items"])


def step_values(
    measurements: Mapping[str, Any],
    alerts: Sequence[Mapping[str, Any]],
    advice: Advice | None,
    measures: Sequence[str],
    rules: set[str],
) -> list[StepValues]:
    """Return the values of each step of `measurements`, in step order.

    `rules` has the rules that fired so far: each has a series that is 1 while it fires, else 0.
    """
    columns = measurements["columns"]
    values: dict[int, dict[str, float]] = {}
    for row, step in enumerate(columns["step"]):
        of_step = values.setdefault(int(step), {})
        for name in measures:
            value = columns.get(name, ())[row : row + 1]
            if value and value[0] is not None and math.isfinite(value[0]):
                of_step[name] = float(value[0])
    incomplete = {int(each["step"]): each for each in measurements.get("incomplete_steps", ())}
    rules |= {str(alert["rule"]) for alert in alerts}
    for step, of_step in values.items():
        short = incomplete.get(step)
        of_step["missing_shards"] = 0.0 if short is None else float(short["expected_shards"] - short["shards"])
        firing = [alert for alert in alerts if _fires_at(alert, step)]
        for severity in SEVERITIES:
            of_step[f"alerts/{severity}"] = float(sum(alert["severity"] == severity for alert in firing))
        named = {str(alert["rule"]) for alert in firing}
        of_step |= {f"alert/{rule}": float(rule in named) for rule in rules}
        if advice is not None:
            of_step["lr_scale"] = advice.scale(step)
            of_step["lr_scale_advised"] = advice.advised_scale(step)
    return [StepValues(step, values[step]) for step in sorted(values)]


def _fires_at(alert: Mapping[str, Any], step: int) -> bool:
    """Return True if the alert fires at `step`; one that a person resolved has no step at which it cleared."""
    cleared = alert.get("cleared_step")
    if int(alert["step"]) > step:
        return False
    return step < int(cleared) if cleared is not None else alert["state"] in ("open", "acknowledged")
