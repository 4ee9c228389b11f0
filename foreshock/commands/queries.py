"""The commands' queries about a run."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import httpx

from foreshock.api.attribution import AttributionRecord
from foreshock.api.runs import RunRecord
from foreshock.api.watch import AlertRecord
from foreshock.client.reader import Reader
from foreshock.comparisons import STEP_ROW
from foreshock.diagnosis.quantities import FIRST_SOURCE, NAMES, names_of, preferred_values
from foreshock.errors import ConfigurationError, Rejected, RunNotFound, ServiceUnavailable, did_you_mean

Answer = TypeVar("Answer")

_POLL_SECONDS = 0.2
_ADVANCE_SECONDS = 5.0
"""A run whose newest data the service still works out is waited for so long; usually it takes much less than 1 s."""


def find_run(reader: Reader, name: str | None) -> RunRecord:
    """Return the run with that id, client key or name, once its newest data is worked out; None: the newest run.

    Raises RunNotFound, ConfigurationError if several projects have the key and the reader is of all, ServiceError.
    """
    if name:
        try:
            return _advanced(reader, reader.run(name))
        except Rejected as error:
            if error.status == httpx.codes.CONFLICT:
                raise ConfigurationError(str(error.problem["detail"]).replace("?project=", "--project")) from error
            if error.status not in (httpx.codes.NOT_FOUND, httpx.codes.UNPROCESSABLE_ENTITY):
                raise
    known: dict[str, None] = {}
    for run in reader.runs():
        if name is None or name == run.name:
            return _advanced(reader, run)
        known |= dict.fromkeys(each for each in (run.key, run.name) if each)
    missing = "no run yet" if name is None else f"no run with the id, key or name {name!r}"
    suggestion = did_you_mean(name or "", known) or "; list them with `foreshock runs`"
    raise RunNotFound(f"{reader.connection.url} has {missing}{suggestion}", status=httpx.codes.NOT_FOUND)


def _advanced(reader: Reader, run: RunRecord) -> RunRecord:
    deadline = time.monotonic() + _ADVANCE_SECONDS
    while run.advancing and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        run = reader.run(run.id)
    return run


Rows = dict[int, dict[str, float]]
"""Step → measure → value; a value that is missing or not finite is absent."""


def measured(reader: Reader, run_id: str, comparison: str, measures: Sequence[str], from_step: int = 0) -> Rows:
    """Return measures of a comparison at the active steps from a step on."""
    answer = reader.measurements(run_id, measures=measures, comparisons=[comparison], from_step=from_step)
    values = {name: answer.columns[name].tolist() for name in measures if name in answer.columns}
    return {
        step: {name: column[at] for name, column in values.items() if math.isfinite(column[at])}
        for at, step in enumerate(answer.columns["step"].tolist())
    }


def measured_or_reported(reader: Reader, run: RunRecord, measures: Sequence[str], from_step: int = 0) -> Rows:
    """Return measures of the rollouts; for those that they lack, the scalars that the trainer reports.

    `run`: as it is now. If it has no rollouts, the steps are those of the scalars.
    """
    rows, declared = measured(reader, run.id, STEP_ROW, measures, from_step), run.scalar_names or {}
    known = {name for values in rows.values() for name in values}
    keys = {each: f"{STEP_ROW}:{each}" for each in measures if each not in known}
    names = {each: names_of([key], declared) for each, key in keys.items() if key in NAMES}
    if not names or (run.last_step is not None and not rows):
        return rows
    of_scalars = [name for known in names.values() for name in known]
    columns = reader.scalars(run.id, names=of_scalars, from_step=from_step).columns
    reported: dict[str, dict[int, float]] = {}
    for name, source, step, value in zip(*map(columns.get, ("name", "source", "step", "value")), strict=True):
        of_name = reported.setdefault(name, {})
        if math.isfinite(value) and (step not in of_name or source == FIRST_SOURCE):
            of_name[int(step)] = float(value)
    values = {each: preferred_values(reported, known) for each, known in names.items()}
    steps = [*rows] or sorted({step for of_measure in values.values() for step in of_measure})
    of_steps = {step: {each: found[step] for each, found in values.items() if step in found} for step in steps}
    return {step: rows.get(step, {}) | of_steps[step] for step in steps}


def sorted_alerts(reader: Reader, run_id: str) -> list[AlertRecord]:
    return sorted(reader.alerts(run_id), key=lambda alert: (alert.step, alert.rule))


def wait_for_attribution(
    reader: Reader, run_id: str, step: int, timeout_seconds: float = 60.0
) -> AttributionRecord | None:
    """Wait until the stored attribution is of all published scores of the step; return the newest, None without."""
    deadline = time.monotonic() + timeout_seconds
    found: AttributionRecord | None = None
    while True:
        try:
            found = if_any(lambda: reader.attribution(run_id, step))
            if found is None or not found.stale:
                return found
        except ServiceUnavailable as error:
            if not str(error.problem.get("type")).endswith(":attribution-pending"):
                raise
        if time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_SECONDS)


def if_any(read: Callable[[], Answer]) -> Answer | None:
    """Return what `read` returns, None if the service has no such result yet."""
    try:
        return read()
    except Rejected as error:
        if error.status == httpx.codes.NOT_FOUND:
            return None
        raise
