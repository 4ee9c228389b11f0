"""The commands' queries about a run, and their checks of a client's delivery."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx

from foreshock.api.attribution import AttributionRecord
from foreshock.api.diagnosis import Diagnosis
from foreshock.api.runs import AttemptRecord, RunRecord
from foreshock.api.watch import AdviceRecord, AlertRecord
from foreshock.client.client import Client
from foreshock.client.reader import Reader
from foreshock.commands.text import Progress
from foreshock.comparisons import STEP_ROW
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.diagnosis.quantities import FIRST_SOURCE, NAMES, names_of, preferred_values
from foreshock.diagnosis.wording import plural
from foreshock.errors import ConfigurationError, Rejected, RunNotFound, ServiceError, ServiceUnavailable, did_you_mean


@dataclass(frozen=True, slots=True)
class Curve:
    """Measures of one comparison over the active steps; `values` has one number per step."""

    comparison: str
    steps: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]
    reported: tuple[str, ...] = ()
    """Measures that the rollouts lack: the values are the trainer's own scalars."""

    def of(self, measure: str) -> tuple[float, ...]:
        """Return one number per step; all NaN if the service does not know the measure."""
        return self.values.get(measure, (math.nan,) * len(self.steps))

    def known(self, measure: str) -> bool:
        """Return True if any step has a finite value of the measure."""
        return any(math.isfinite(value) for value in self.of(measure))

    @property
    def has_rollouts(self) -> bool:
        """Return False if every step has only scalars."""
        return bool(self.steps) and not (self.reported and all(each in self.reported for each in self.values))


def values_of_steps(mismatch: Curve, rollouts: Curve) -> list[dict[str, float]]:
    """Return the finite values of each step of `mismatch` by `comparison:measure`, with the lag of its rollouts."""
    lags = dict(zip(rollouts.steps, rollouts.of("lag_mean"), strict=True))
    found = []
    for index, step in enumerate(mismatch.steps):
        values = {f"{mismatch.comparison}:{name}": series[index] for name, series in mismatch.values.items()}
        values[LAG_KEY] = lags.get(step, math.nan)
        found.append({key: value for key, value in values.items() if math.isfinite(value)})
    return found


_STALLED_SECONDS = 120.0


def wait_for_delivery(client: Client) -> None:
    """Wait until everything is delivered. Raises ServiceUnavailable if it stalls, Rejected for rejected items."""
    progress = Progress("delivering", client.counters.accepted)
    delivered, since = -1, time.monotonic()
    while (status := client.flush(0.2)).undelivered:
        now = client.counters.delivered
        progress.show(now)
        if now != delivered:
            delivered = now
            since = time.monotonic()
        elif time.monotonic() - since > _STALLED_SECONDS:
            raise ServiceUnavailable(
                f"nothing was delivered for {_STALLED_SECONDS:.0f} s ({status.reason or 'no answer'}); the rest is "
                f"kept in {client.settings.spool_directory} and sent by the next import"
            )
    progress.show(client.counters.delivered)
    refuse_losses(client)


def losses_of(client: Client) -> int:
    """Return the number of items that were rejected, dropped, or could not be encoded.

    Rollouts that were left out of a shard are none: the service is told of them, and their shard has arrived.
    """
    now = client.counters.snapshot()
    return int(now.rejected + now.invalid - now.left_out + now.dropped)


def refuse_losses(client: Client) -> None:
    """Raise Rejected if the service rejected items, or the client dropped some or could not encode them."""
    now = client.counters.snapshot()
    if losses_of(client):
        kept = client.settings.spool_directory / "*.rejected"
        raise Rejected(
            f"{plural(now.rejected, 'item')} rejected by the service ({kept}), {now.invalid} invalid, "
            f"{now.dropped} dropped"
        )


@contextmanager
def closing_import(client: Client, reader: Reader, *, unfinished: bool) -> Iterator[None]:
    """Close the client after the block. If that raises, mark its run as failed, unless the run had ended before.

    `unfinished` leaves the run's state as it is.
    """
    try:
        yield
    except BaseException:
        if not unfinished:
            _fail_run(client, reader)
        raise
    finally:
        client.close()


def _fail_run(client: Client, reader: Reader) -> None:
    if client.newest_step < 0:
        return
    client.flush(client.settings.exit_seconds)
    run = client.run_id
    with suppress(ServiceError):
        if run is not None and find_run(reader, run).state in ("running", "stale"):
            client.finish(failed=True)
            print(
                f"note: the run {client.run_key} is marked as failed; the same command continues it: what is stored is "
                "not sent again",
                file=sys.stderr,
            )


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


class RunQueries:
    """Queries about one run. All methods raise ServiceError and return None if there is no result yet."""

    def __init__(self, reader: Reader, run: str) -> None:
        self._reader = reader
        self._run = run

    def curve(self, comparison: str, measures: Sequence[str], *, from_step: int = 0) -> Curve:
        """Return measures of a comparison from a step on."""
        answer = self._reader.measurements(self._run, measures=measures, comparisons=[comparison], from_step=from_step)
        columns = answer.columns
        return Curve(
            comparison,
            tuple(columns["step"].tolist()),
            {name: tuple(columns[name].tolist()) for name in measures if name in columns},
        )

    def rollouts(self, run: RunRecord, measures: Sequence[str], *, from_step: int = 0) -> Curve:
        """Return measures of the rollouts; for those that they lack, the scalars that the trainer reports.

        `run`: this run as it is now. If it has no rollouts, the steps are those of the scalars.
        """
        curve = self.curve(STEP_ROW, measures, from_step=from_step)
        keys = {each: f"{STEP_ROW}:{each}" for each in measures if not curve.known(each)}
        declared = run.scalar_names or {}
        names = {each: names_of([key], declared) for each, key in keys.items() if key in NAMES}
        if not names or (run.last_step is not None and not curve.steps):
            return curve
        scalars = self._scalars([name for known in names.values() for name in known], from_step)
        found = {each: preferred_values(scalars, known) for each, known in names.items()}
        found = {each: by_step for each, by_step in found.items() if by_step}
        steps = curve.steps or tuple(sorted({step for by_step in found.values() for step in by_step}))
        reported = {each: tuple(by_step.get(step, math.nan) for step in steps) for each, by_step in found.items()}
        values = {**curve.values, **reported} if curve.steps else reported
        return replace(curve, steps=steps, values=values, reported=tuple(reported))

    def _scalars(self, names: Sequence[str], from_step: int) -> dict[str, dict[int, float]]:
        """Return name → step → finite value, each from its preferred source."""
        columns = self._reader.scalars(self._run, names=names, from_step=from_step).columns
        found: dict[str, dict[int, float]] = {}
        rows = zip(*(columns[each].tolist() for each in ("name", "source", "step", "value")), strict=True)
        for name, source, step, value in rows:
            of_name = found.setdefault(name, {})
            if math.isfinite(value) and (step not in of_name or source == FIRST_SOURCE):
                of_name[step] = value
        return found

    def wait_for_attribution(self, step: int, timeout_seconds: float = 60.0) -> AttributionRecord | None:
        """Wait until the stored attribution is of all published scores of the step; return the newest, None without."""
        deadline = time.monotonic() + timeout_seconds
        found: AttributionRecord | None = None
        while True:
            try:
                found = _optional(lambda: self._reader.attribution(self._run, step))
                if found is None or not found.stale:
                    return found
            except ServiceUnavailable as error:
                if not str(error.problem.get("type")).endswith(":attribution-pending"):
                    raise
            if time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_SECONDS)

    def attempts(self) -> tuple[AttemptRecord, ...]:
        """Return all attempts, in the order in which they were registered."""
        return tuple(self._reader.attempts(self._run))

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis."""
        return self._reader.diagnosis(self._run)

    def alerts(self) -> tuple[AlertRecord, ...]:
        """Return all alerts, ordered by step."""
        alerts = self._reader.alerts(self._run)
        return tuple(sorted(alerts, key=lambda alert: (alert.step, alert.rule)))

    def advice(self) -> AdviceRecord | None:
        """Return the learning-rate advice."""
        return _optional(lambda: self._reader.advice(self._run))


def _optional(read: Callable[[], Answer]) -> Answer | None:
    """Return what `read` returns, None if the service has no such result yet."""
    try:
        return read()
    except Rejected as error:
        if error.status == httpx.codes.NOT_FOUND:
            return None
        raise
