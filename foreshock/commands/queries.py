"""Queries of the commands to the service: runs, curves, buckets, attributions, alerts and advice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from foreshock.client.connection import ServiceConnection
from foreshock.commands.records import (
    AdviceRecord,
    AlertRecord,
    AttributionRecord,
    Bucket,
    Curve,
    HealthRecord,
    RunRecord,
    alert_record,
    attribution_record,
    health_record,
    run_record,
)
from foreshock.errors import ConfigurationError, Rejected, RunNotFound, ServiceUnavailable
from foreshock.json_values import number_or_nan
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.applied import Applied
from foreshock.model_kind import ModelKind
from foreshock.suggestions import did_you_mean

__all__ = ["RunQueries", "find_run", "list_runs"]

_PAGE = 200
_POLL_SECONDS = 0.2


def list_runs(connection: ServiceConnection, project: str | None = None) -> Iterator[RunRecord]:
    """Yield all runs that the API key can read, newest first. Raises ServiceError."""
    cursor: str | None = None
    while True:
        page = connection.get_json("/v1/runs", {"limit": _PAGE, "cursor": cursor, "project": project})
        for item in page["items"]:
            yield run_record(item)
        cursor = page.get("next_cursor")
        if cursor is None:
            return


def find_run(connection: ServiceConnection, name: str | None, project: str | None = None) -> RunRecord:
    """Return the run with that id, client key or name; None: the newest run.

    Raises RunNotFound, ConfigurationError if several projects have the key and `project` is None, ServiceError.
    """
    if name:
        try:
            return run_record(connection.get_json(f"/v1/runs/{quote(name, safe='')}", {"project": project}))
        except Rejected as error:
            if error.status == httpx.codes.CONFLICT:
                raise ConfigurationError(str(error.problem["detail"]).replace("?project=", "--project")) from error
            if error.status not in (httpx.codes.NOT_FOUND, httpx.codes.UNPROCESSABLE_ENTITY):
                raise
    known: dict[str, None] = {}
    for run in list_runs(connection, project):
        if name is None or name == run.name:
            return run
        known |= dict.fromkeys(each for each in (run.key, run.name) if each)
    missing = "no run yet" if name is None else f"no run with the id, key or name {name!r}"
    suggestion = did_you_mean(name or "", known) or "; list them with `foreshock runs`"
    raise RunNotFound(f"{connection.url} has {missing}{suggestion}", status=httpx.codes.NOT_FOUND)


class RunQueries:
    """Queries about one run. All methods raise ServiceError and return None if there is no result yet."""

    def __init__(self, connection: ServiceConnection, run: str) -> None:
        self._connection = connection
        self._path = f"/v1/runs/{run}"

    def curve(self, comparison: str, measures: Sequence[str], *, from_step: int = 0) -> Curve:
        """Return measures of a comparison from a step on, without those that the service does not know."""
        try:
            answer = self._measurements(comparison, measures, from_step)
        except Rejected as error:
            if error.status != httpx.codes.UNPROCESSABLE_ENTITY:
                raise
            known = {item["column"] for item in self._connection.get_json("/v1/measures")["items"]}
            if known >= set(measures):
                raise
            answer = self._measurements(comparison, [measure for measure in measures if measure in known], from_step)
        columns = answer["columns"]
        incomplete = {
            int(step["step"]): (int(step["shards"]), int(step["expected_shards"]))
            for step in answer.get("incomplete_steps") or ()
        }
        values = {name: tuple(map(number_or_nan, columns[name])) for name in measures if name in columns}
        coverage = {int(step["step"]): str(step["text"]) for step in answer.get("statistics_steps") or ()}
        return Curve(comparison, tuple(columns["step"]), values, incomplete, coverage)

    def _measurements(self, comparison: str, measures: Sequence[str], from_step: int) -> Any:
        query: list[tuple[str, str | int | float | None]] = [("comparison", comparison), ("from_step", from_step)]
        query += [("measure", measure) for measure in measures]
        return self._connection.get_json(f"{self._path}/measurements", query)

    def buckets(self, step: int, comparison: str) -> tuple[Bucket, ...] | str:
        """Return the buckets of a step that hold tokens; the reason as a sentence if another release measured them."""
        try:
            answer = self._optional(f"{self._path}/steps/{step}/buckets", {"comparison": comparison})
        except Rejected as error:
            if error.status != httpx.codes.CONFLICT:
                raise
            return f"{error}."
        if answer is None:
            return ()
        edges, columns = answer["edges"], answer["columns"]
        measures = Bucket.__slots__[3:]
        buckets = (
            Bucket(
                low, high, int(columns["tokens"][index]), *(number_or_nan(columns[name][index]) for name in measures)
            )
            for index, (low, high) in enumerate(itertools.pairwise(edges))
        )
        return tuple(bucket for bucket in buckets if bucket.tokens)

    def attribution(self, step: int) -> AttributionRecord | None:
        """Return the stored attribution of a step; None if it was not probed or the first one is being computed."""
        answer, _ = self._stored_attribution(step)
        return None if answer is None else attribution_record(step, answer)

    def wait_for_attribution(self, step: int, timeout_seconds: float = 60.0) -> bool:
        """Wait until the stored attribution is of all published scores of the step; return False after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            _, is_current = self._stored_attribution(step)
            if is_current or time.monotonic() >= deadline:
                return is_current
            time.sleep(_POLL_SECONDS)

    def _stored_attribution(self, step: int) -> tuple[Any, bool]:
        """Return the answer, None if there is none, and False if the service is computing another one."""
        try:
            answer = self._optional(f"{self._path}/steps/{step}/attribution", {})
        except ServiceUnavailable as error:
            if not str(error.problem.get("type")).endswith(":attribution-pending"):
                raise
            return None, False
        return answer, answer is None or not answer.get("stale")

    def probed_steps(self) -> tuple[int, ...]:
        """Return the steps with at least one finished job of a probe."""
        states = self._probes()
        return tuple(sorted({int(probe["step"]) for probe in states if _any_done(probe)}))

    def unfinished_probes(self) -> tuple[tuple[int, str, str], ...]:
        """Return step, state and reason of each probe that is not done."""
        return tuple(
            (int(probe["step"]), str(probe["state"]), str(probe.get("reason") or ""))
            for probe in self._probes()
            if probe["state"] != "done"
        )

    def health(self, model_kind: ModelKind | None = None) -> HealthRecord:
        """Return the verdict on the newest steps, judged as `model_kind` (None: the run's); unknown if not served."""
        answer = self._optional(f"{self._path}/health", {} if model_kind is None else {"model_kind": model_kind})
        return HealthRecord() if answer is None else health_record(answer)

    def alerts(self) -> tuple[AlertRecord, ...]:
        """Return all alerts, ordered by step."""
        items = self._items(f"{self._path}/alerts")
        return tuple(sorted((alert_record(item) for item in items), key=lambda alert: (alert.step, alert.rule)))

    def advice(self) -> AdviceRecord | None:
        """Return the learning-rate advice."""
        answer = self._optional(f"{self._path}/lr-advice", {})
        if answer is None:
            return None
        advice = Advice.from_json(answer)
        advised = answer.get("advised_scale", answer.get("scale"))
        applied = answer.get("applied")
        return AdviceRecord(
            advice,
            number_or_nan(advised),
            answer.get("next_decay_step"),
            None if applied is None else Applied.from_json(applied),
        )

    def _probes(self) -> list[dict[str, Any]]:
        return self._items(f"{self._path}/probes")

    def _items(self, path: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self._connection.get_json(path, {"cursor": cursor})
            items += page["items"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return items

    def _optional(self, path: str, query: Mapping[str, str]) -> Any:
        try:
            return self._connection.get_json(path, query)
        except Rejected as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise


def _any_done(probe: Mapping[str, Any]) -> bool:
    return probe["state"] == "done" or any(job.get("state") == "done" for job in probe.get("jobs") or ())
