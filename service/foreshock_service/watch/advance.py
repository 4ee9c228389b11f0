"""Advance a run: work out all that follows from its stored data, after anything has changed it.

    fold what closed → judge the steps → read findings again → store, decide, diagnose

An upload, scalars, a late shard, a resume, a new release or another rules file only mark the run (`runs/due.py`). One
worker in each process of the service takes the marked runs, that with the oldest mark first; of several processes one
at a time advances a run. A turn reads in one session and stores in one short transaction, which removes the marks whose
changes are included: after a crash they are still there. An error of a run opens an alert on its page; the parts that
do not depend on it go on, and so do the other runs. A run that must be judged again over many steps takes turns with
the others.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from foreshock.api.runs import FindingSource
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.jobs import Job, JobRunner
from foreshock_service.replay.attribution.service import causes_of_run
from foreshock_service.replay.results import documents
from foreshock_service.runs import diagnoses, due, findings, lint, runs, shards, steps, weights
from foreshock_service.runs.events import StepKey
from foreshock_service.runs.failing_runs import RunIsolated, isolated, isolated_part
from foreshock_service.watch import alerts, diagnosis
from foreshock_service.watch.advice.service import decide_after_detection
from foreshock_service.watch.detection import derivation

INTERVAL_SECONDS: Final = 0.5
"""How often a worker looks for runs that another process has marked; its own process wakes it."""

_TURN_SECONDS = 0.2
"""A run that takes longer to judge goes on after the other runs have had their turn."""

_TRIES = 5
"""So often a step is closed in a turn, as its shards keep arriving."""

_Findings = Mapping[FindingSource, Sequence[findings.Finding]]

_FINDINGS: Mapping[FindingSource, findings.Read] = {
    "lint": lint.findings_of_run,
    "attribution": causes_of_run,
    "doctor": documents.causes_of_run,
    "notary": weights.findings_of_run,
}

_logger = logging.getLogger(__name__)


class Advancing:
    """The worker of one process. `wake` it after a change."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._turn = threading.Lock()
        # Runs whose derivation goes on in a later turn.
        self._begun: dict[str, derivation.Derivation] = {}
        outdated = partial(derivation.mark_outdated, context.database)
        jobs = [
            Job("mark_outdated_runs", outdated, shared=False, every_seconds=math.inf),
            Job("advance_runs", self.advance_due_runs, shared=False),
        ]
        self.runner = JobRunner("advance", context.database, jobs, INTERVAL_SECONDS)
        context.database.session_info[due.WAKE] = self.wake

    def wake(self) -> None:
        """Advance the runs that are due, soon and in the worker's thread."""
        self.runner.wake()

    def advance_due_runs(self) -> int:
        """Give each run that is due its turn, and return how many of them are done."""
        with self._turn:
            with self._context.database.read() as session:
                run_ids = due.due_runs(session)
            return sum(self._try_to_advance(run_id) for run_id in run_ids if not self._context.stopping.is_set())

    def _try_to_advance(self, run_id: str) -> bool:
        try:
            with (
                self._context.database.exclusive(f"advance {run_id}") as is_alone,
                self._isolated(run_id, "advance it"),
            ):
                return is_alone and self.advance(run_id)
        except SQLAlchemyError:
            _logger.exception("run %s could not be advanced; it is tried again", run_id)
        return False

    def advance(self, run_id: str) -> bool:
        """Advance a run if it is due, as far as one turn goes; return True if it is done."""
        database, grace_us = self._context.database, shards.grace_us(self._context)
        tried = Counter[StepKey]()
        while True:
            with database.read() as session:
                marks = due.marks_of(session, run_id)
                if not marks:
                    return False
                # After the marks: the shards of each of these are included, also of one that came while a step closed.
                waiting = [key for key in steps.waiting_steps(session, grace_us, run_id) if tried[key] < _TRIES]
                if not waiting:
                    derived = self._judge(session, run_id, marks)
                    is_whole = derived is None or derived.is_whole
                    found = self._read_findings(session, run_id, marks) if is_whole else {}
                    break
            for key in waiting:
                # Closing a step marks it. One that cannot be closed is tried again later (`mark_waiting_runs`).
                tried[key] += 1 if shards.close_step(self._context, key) else _TRIES
        is_stored = (derived is None or derived.can_be_stored) and database.write(
            partial(self._store, run_id, marks, derived, found)
        )
        if derived is not None and not is_stored:
            self._begun[run_id] = derived
        return is_stored and is_whole

    def _judge(self, session: Session, run_id: str, marks: Collection[due.Mark]) -> derivation.Derivation | None:
        """Judge the marked steps, as far as one turn goes; None if none is marked."""
        end = time.monotonic() + _TURN_SECONDS

        def may_go_on() -> bool:
            return time.monotonic() < end and not self._context.stopping.is_set()

        with self._isolated(run_id, "judge its steps"):
            derived = derivation.begin(session, run_id, marks, self._begun.pop(run_id, None))
            if derived is not None:
                derivation.go_on(session, run_id, derived, may_go_on)
            return derived
        return None

    def _read_findings(self, session: Session, run_id: str, marks: Collection[due.Mark]) -> _Findings:
        found = {}
        for source in {each.source for each in marks if each.source is not None}:
            with self._isolated(run_id, f"read its findings of the {source}"):
                found[source] = _FINDINGS[source](session, run_id)
        return found

    def _isolated(self, run_id: str, work: str) -> RunIsolated:
        return RunIsolated(self._context.database, self._context.events, run_id, work)

    def _store(
        self,
        run_id: str,
        marks: Collection[due.Mark],
        derived: derivation.Derivation | None,
        found: _Findings,
        session: Session,
    ) -> bool:
        """Store what was found, decide what follows and diagnose the run; False if a step has changed meanwhile."""
        events = self._context.events
        run = runs.lock_run_for_background(session, run_id)
        if run is not None and derived is not None:
            with isolated_part(session, events, run_id, "judge its steps"):
                detected = derivation.store(session, run, derived)
                if detected is None:
                    return False
                for each in detected:
                    alerts.reconcile_alerts(session, each)
                    isolated(events, decide_after_detection)(session, each)
        if run is not None and derived is not None and not derived.is_whole:
            return True
        if run is not None:
            for source, of_source in found.items():
                with isolated_part(session, events, run_id, f"store its findings of the {source}"):
                    findings.replace_findings(session, run_id, source, of_source)
            with isolated_part(session, events, run_id, "diagnose it"):
                diagnosed, awaits_shards = diagnosis.diagnosis_to_store(session, run_id)
                quiet = derived is not None and derived.judged_until >= 0
                diagnoses.store_diagnosis(session, run_id, diagnosed, awaits_shards=awaits_shards, quiet=quiet)
        due.remove(session, [each.id for each in marks])
        return True


def mark_waiting_runs(context: ServiceContext) -> int:
    """Mark the runs that time alone makes due, and return how many.

    Their step got no shard for the grace time, or waits long for one; or their diagnosis is of another release.
    """
    with context.database.read() as session:
        waiting = steps.waiting_steps(session, shards.grace_us(context))
        found = {key.run_id for key in waiting} | diagnosis.runs_to_diagnose(session)
        found -= due.due_among(session, found)
    for run_id in sorted(found):
        context.database.write(partial(due.mark, run_id=run_id))
    return len(found)
