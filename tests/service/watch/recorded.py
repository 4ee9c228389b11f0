"""Closed steps written straight into the database, and StepClosed published as ingestion publishes it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from foreshock.changes import ChangeKind
from foreshock.learning_rate.decisions import AdviceState, fold
from foreshock_service.app import subscribe_handlers
from foreshock_service.platform.context import EventBus, ServiceContext
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import MEASUREMENT_KEY, Alert, DetectorSnapshot, Run, Step, measurements
from foreshock_service.platform.security import UNRESTRICTED
from foreshock_service.platform.settings import Settings
from foreshock_service.runs.attempts import AttemptCreate, get_or_create_attempt
from foreshock_service.runs.changes import ChangePut, announce_change
from foreshock_service.runs.events import StepClosed, StepKey
from foreshock_service.runs.runs import RunCreate, get_or_create_run
from foreshock_service.runs.scalars import ScalarsPut, store_scalars
from foreshock_service.runs.steps import mark_step
from foreshock_service.watch.advance import Advancing
from foreshock_service.watch.advice import service as advice
from foreshock_service.watch.detection import states

LENGTH = "rollout:response_length_mean"
K3 = "trainer/rollout:k3_kl"
SURGE = [100.0] * 10 + [260.0] * 8
"""Lengths at `SURGE_STEPS`. They surge at step 111: the period of the default schedule is 199."""

SURGE_STEPS = range(101, 119)


@dataclass
class RecordedRun:
    """A run whose steps close with given values; `values` has the keys of the detectors."""

    database: Database
    run: str = ""
    attempt: int = 1
    alert_versions: list[int] = field(default_factory=list)
    events: EventBus = field(default_factory=lambda: subscribe_handlers(EventBus()))

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Advance the run after each write to its database."""
        others: Any = dict.fromkeys(("store", "decoders", "uploads"))
        context = ServiceContext(
            settings=Settings(), database=self.database, session_secret=b"", events=self.events, **others
        )
        self.advancing = Advancing(context)

    def begin(self, key: str = "a-run", **fields: object) -> RecordedRun:
        """Create the run and its first attempt."""

        def work(session: Session) -> str:
            run, _ = get_or_create_run(session, self.events, UNRESTRICTED, RunCreate(key=key, **fields))  # type: ignore[arg-type]
            get_or_create_attempt(session, self.events, UNRESTRICTED, run.id, AttemptCreate(key="first"))
            return run.id

        self.run = self.database.write(work)
        return self

    def resume(self, resume_step: int) -> None:
        """Begin the next attempt; what closes from now on is its."""
        body = AttemptCreate(key=f"resume-{self.attempt}", resume_step=resume_step)
        self.attempt = self.database.write(
            lambda session: get_or_create_attempt(session, self.events, UNRESTRICTED, self.run, body)[0].attempt
        )

    def close(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        """Close a step with these values, or change the values of one that is closed."""
        number = self.attempt if attempt is None else attempt

        def work(session: Session) -> None:
            key = {"run_id": self.run, "attempt": number, "step": step}
            if session.get(Step, (self.run, number, step)) is None:
                columns = ("expected_shards", "received_shards", "folded_shards", "rollouts", "tokens")
                times = ("first_shard_at_us", "last_shard_at_us", "closed_at_us")
                session.execute(insert(Step), [{**key, **dict.fromkeys((*columns, *times), 1)}])
            for name, value in values.items():
                comparison, _, measure = name.partition(":")
                row = {**key, "comparison": comparison, "from_sample": False, "computed_at_us": 1, measure: value}
                upsert(session, measurements, [row], MEASUREMENT_KEY)
            session.execute(
                update(Run).where(Run.id == self.run).values(last_step=step, last_shard_at_us=time.time_ns() // 1000)
            )
            self.events.publish(session, StepClosed(self.run, number, step))
            mark_step(session, StepKey(self.run, number, step))

        self.database.write(work)
        versions = [alert.version for alert in self.alerts()]
        assert len(set(versions)) == len(versions)
        self.alert_versions.append(max(versions, default=0))

    def close_all(self, series: Mapping[str, Iterable[float]], steps: Iterable[int]) -> None:
        for step, *row in zip(steps, *series.values(), strict=False):
            self.close(step, dict(zip(series, row, strict=True)))

    def log(self, step: int, values: Mapping[str, float | None], attempt: int | None = None) -> None:
        number = self.attempt if attempt is None else attempt
        body = ScalarsPut(values=dict(values))
        self.database.write(
            lambda session: store_scalars(session, self.events, UNRESTRICTED, StepKey(self.run, number, step), body)
        )

    def announce(self, step: int, kind: ChangeKind) -> None:
        key = StepKey(self.run, self.attempt, step)
        self.database.write(lambda session: announce_change(session, UNRESTRICTED, key, kind, ChangePut()))

    def alerts(self) -> list[Alert]:
        with self.database.read() as session:
            query = select(Alert).where(Alert.run_id == self.run).order_by(Alert.step, Alert.attempt, Alert.rule)
            return list(session.scalars(query))

    def states(self) -> dict[tuple[str, int], str]:
        """(rule, step) → state."""
        return {(alert.rule, alert.step): alert.state for alert in self.alerts()}

    def snapshots(self) -> list[DetectorSnapshot]:
        with self.database.read() as session:
            query = select(DetectorSnapshot).where(DetectorSnapshot.run_id == self.run)
            return list(session.scalars(query.order_by(DetectorSnapshot.step)))

    def newest_state(self) -> bytes:
        """Return the detectors' state after the newest step, derived from what is stored."""
        with self.database.read() as session:
            return states.newest_state(session, self.run).to_bytes()

    def advice(self) -> AdviceState:
        """The state that the log of decisions folds to."""
        with self.database.read() as session:
            state = fold(advice.log_of(session, self.run))
            assert advice.state_of(session, self.run) == state
            return state

    def decisions(self) -> list[str]:
        with self.database.read() as session:
            return [decision.kind for decision in advice.log_of(session, self.run)]
