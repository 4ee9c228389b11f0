"""Leases as a state machine, on both databases.

In any order of events no job counts twice, every job ends, and only the holder of the newest token changes a job.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.api.leases import LeaseRecord
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import tables
from foreshock_service.platform.database.engine import insert_if_absent
from foreshock_service.platform.security import Principal, Scope
from foreshock_service.replay import leases
from foreshock_service.replay.leases import FailBody, LeaseLost, LeaseRequest
from foreshock_service.replay.probes import service as probes
from foreshock_service.replay.probes.jobs import JobState, Outcome, new_jobs
from foreshock_service.replay.results import publishing
from tests.service.replay.leases.conftest import Clock

Result = TypeVar("Result")
ENGINES = ("torch", "vllm")
SCORERS = {"torch": "torch.float32", "vllm": "vllm.prefill"}


class LeaseMachine(RuleBasedStateMachine):
    """Two probes of two jobs each in a project of their own; a model of which lease holds which job."""

    granted: Bundle[LeaseRecord] = Bundle("granted")

    def __init__(self, context: ServiceContext, clock: Clock) -> None:
        super().__init__()
        self.context, self.clock = context, clock
        self.project = tables.new_identifier("project")
        self.principal = Principal(None, self.project, frozenset(Scope))
        self.jobs: dict[str, str] = {}  # job id → its probe's id
        self.holder: dict[str, LeaseRecord] = {}
        self.ends_at: dict[str, int] = {}
        self.tries: dict[str, int] = {}
        self.newest_token: dict[str, int] = {}
        self.ended: dict[str, JobState] = {}
        self.completed_by: dict[str, int] = {}
        context.database.write(self._set_up)

    def _set_up(self, session: Session) -> None:
        run = tables.new_identifier("run")
        values = dict.fromkeys(
            ("name", "model", "trainer", "engine", "hardware", "initial_learning_rate", "length_cap")
        )
        session.add(
            tables.Run(
                id=run, project=self.project, key="k", advice_mode="shadow", state="running", last_step=1,
                created_at_us=1, updated_at_us=1, deleted_at_us=None, **values,
            )
        )  # fmt: skip
        session.flush()
        session.add(tables.Attempt(run_id=run, attempt=1, key="a", resume_step=0, fingerprint={}, created_at_us=1))
        session.flush()
        sizes = dict.fromkeys(("expected_shards", "received_shards", "folded_shards", "rollouts", "tokens"), 1)
        times = dict.fromkeys(("first_shard_at_us", "last_shard_at_us", "closed_at_us"), 1)
        session.add(tables.Step(run_id=run, attempt=1, step=1, **sizes, **times))
        session.flush()
        for number in range(2):
            probe = _probe(run, f"request-{number}", self.clock.now + number)
            session.add(probe)
            session.flush()
            for job in new_jobs(probe, (), self.clock.now + number):
                session.add(job)
                self.jobs[job.id] = probe.id
        self.tries = dict.fromkeys(self.jobs, 0)
        self.newest_token = dict.fromkeys(self.jobs, 0)

    @rule(
        target=granted, worker=st.sampled_from(["a", "b", "c"]), engines=st.sets(st.sampled_from(ENGINES), min_size=1)
    )
    def claim(self, worker: str, engines: set[str]) -> Any:
        """A worker requests a job; it gets one exactly if one is queued that it can do."""
        request = LeaseRequest(worker=worker, scorers=[SCORERS[engine] for engine in sorted(engines)])
        lease = self._claim(request)
        self._expire()
        waiting = {job for job in self.jobs if job not in self.holder and job not in self.ended}
        if lease is None:
            assert not {job for job in waiting if self._engine(job) in engines}
            return multiple()
        job = lease.job.id
        assert job in waiting
        assert lease.token == self.newest_token[job] + 1
        self.holder[job] = lease
        self.newest_token[job] = lease.token
        self.tries[job] += 1
        self.ends_at[job] = self.clock.now + self._duration
        return lease

    @rule(lease=granted)
    def heartbeat(self, lease: LeaseRecord) -> None:
        """A heartbeat extends the lease of the holder only."""
        job = lease.job.id
        if self._holds(lease):
            self.ends_at[job] = max(self.ends_at[job], self.clock.now + self._duration)
            assert self._write(leases.extend_lease, lease) == self.ends_at[job]
        else:
            with pytest.raises(LeaseLost):
                self._write(leases.extend_lease, lease)

    @rule(lease=granted, wrong=st.integers(1, 9))
    def guess_a_token(self, lease: LeaseRecord, wrong: int) -> None:
        """A token that is not the lease's own never works."""
        if wrong != lease.token:
            with pytest.raises(LeaseLost):
                self._write(leases.extend_lease, lease, token=wrong)

    @rule(lease=granted)
    def complete(self, lease: LeaseRecord) -> None:
        """The holder completes its job; a repeated request changes nothing; another worker's is refused."""
        job = lease.job.id
        if self._holds(lease):
            self.context.database.write(lambda session: _send_scores(session, lease))
            self._publish(lease)
            self.ended[job] = JobState.DONE
            self.completed_by[job] = lease.token
            del self.holder[job]
        elif self.completed_by.get(job) == lease.token:
            self._publish(lease)
        else:
            with pytest.raises(LeaseLost):
                self._publish(lease)

    @rule(lease=granted, kind=st.sampled_from(["retry", "retry", "final", "skipped"]))
    def fail(self, lease: LeaseRecord, kind: str) -> None:
        """The holder reports a failure: the job is queued again, or the probe ends."""
        body = FailBody(token=lease.token, reason="why", kind=kind)  # type: ignore[arg-type]
        if not self._holds(lease):
            with self.context.database.read() as session:
                ended = session.get(tables.Lease, lease.lease)
                is_repeated = ended is not None and ended.outcome == Outcome(kind)
            if is_repeated:
                self._write(leases.fail_job, lease, body)
                return
            with pytest.raises(LeaseLost):
                self._write(leases.fail_job, lease, body)
            return
        self._write(leases.fail_job, lease, body)
        job = lease.job.id
        del self.holder[job]
        if kind == "retry":
            self._count_failed_try(job)
            return
        state = JobState.FAILED if kind == "final" else JobState.SKIPPED
        for other, probe in self.jobs.items():
            if probe == self.jobs[job] and other not in self.ended:
                self.ended[other] = state
                self.holder.pop(other, None)

    @rule(seconds=st.sampled_from([1, 30, 61, 200]))
    def time_passes(self, seconds: int) -> None:
        """Time passes without any request."""
        self.clock.pass_seconds(seconds)

    @rule()
    def sweep(self) -> None:
        """The service expires leases without heartbeats."""
        leases.sweep(self.context)
        self._expire()

    @rule(data=st.data())
    def retry_a_probe(self, data: st.DataObject) -> None:
        """An operator retries an ended probe; its done jobs stay done."""
        probe = data.draw(st.sampled_from(sorted(set(self.jobs.values()))))
        own = [job for job in self.jobs if self.jobs[job] == probe]
        if not all(job in self.ended for job in own):
            with pytest.raises(probes.ProbeStillRuns):
                self.context.database.write(lambda session: probes.retry_probe(session, self.principal, probe))
            return
        self.context.database.write(lambda session: probes.retry_probe(session, self.principal, probe))
        for job in own:
            if self.ended[job] is not JobState.DONE:
                del self.ended[job]
                self.tries[job] = 0

    @rule(lease=consumes(granted))
    def forget(self, lease: LeaseRecord) -> None:
        """A worker dies without reporting."""

    @invariant()
    def the_database_agrees(self) -> None:
        """States, tokens and published scores are those of the model."""
        with self.context.database.read() as session:
            rows = {
                row.id: row for row in session.scalars(select(tables.ProbeJob).where(tables.ProbeJob.id.in_(self.jobs)))
            }
            published = {
                row.job_id: row.token for row in session.scalars(select(tables.Score)) if row.job_id in self.jobs
            }
            for job, row in rows.items():
                running = JobState.RUNNING if job in self.holder else JobState.QUEUED
                assert row.state == self.ended.get(job, running)
                assert row.fencing_token == self.newest_token[job]
                assert row.tries == self.tries[job]
        assert published == self.completed_by

    def teardown(self) -> None:
        """Let good workers do the rest: every job ends."""
        self.clock.pass_seconds(1000)
        request = LeaseRequest(worker="good", scorers=list(SCORERS.values()))
        while (lease := self._claim(request)) is not None:
            self.context.database.write(partial(_send_scores, lease=lease))
            self._publish(lease)
        with self.context.database.read() as session:
            states = session.scalars(select(tables.ProbeJob.state).where(tables.ProbeJob.id.in_(self.jobs))).all()
        assert set(states) <= {JobState.DONE, JobState.FAILED, JobState.SKIPPED}

    @property
    def _duration(self) -> int:
        return int(self.context.settings.lease_seconds * 1e6)

    def _claim(self, request: LeaseRequest) -> LeaseRecord | None:
        return self.context.database.write(
            lambda session: leases.claim_job(session, self.context, self.principal, request)
        )

    def _write(self, ask: Callable[..., Result], lease: LeaseRecord, *asked: Any, token: int | None = None) -> Result:
        held = leases.AskedLease(self.context, self.principal, lease.lease, token or lease.token)
        return self.context.database.write(lambda session: ask(session, held, *asked))

    def _publish(self, lease: LeaseRecord) -> None:
        self._write(publishing.publish_job, lease)

    def _engine(self, job: str) -> str:
        with self.context.database.read() as session:
            row = session.get(tables.ProbeJob, job)
            assert row is not None
            return row.engine

    def _holds(self, lease: LeaseRecord) -> bool:
        held = self.holder.get(lease.job.id)
        return held is not None and held.lease == lease.lease

    def _expire(self) -> None:
        for job in [job for job in self.holder if self.ends_at[job] <= self.clock.now]:
            del self.holder[job]
            self._count_failed_try(job)

    def _count_failed_try(self, job: str) -> None:
        if self.tries[job] >= self.context.settings.probe_tries:
            self.ended[job] = JobState.FAILED


def _probe(run: str, request: str, created_at_us: int) -> tables.Probe:
    return tables.Probe(
        id=tables.new_identifier("probe"), run_id=run, attempt=1, step=1, kind="exact", request_digest=request,
        scorers=[{"scorer": SCORERS[engine], "variant": ""} for engine in ENGINES], exact_pairs=[], options={},
        accelerator=None, max_rollouts=None, checkpoint_expires_at_us=None,
        selection=[], rollouts=1, tokens=1, rollout_set_digest=request, from_sample=False, created_at_us=created_at_us,
        checkpoint={"root": "r", "path": "p", "format": "f", "digest": "d", "step": 1, "weights_version": None},
    )  # fmt: skip


def _send_scores(session: Session, lease: LeaseRecord) -> None:
    for asked in lease.job.scorers:
        row = {
            "job_id": lease.job.id, "token": lease.token, "scorer": asked.scorer, "variant": asked.variant,
            "digest": "d", "body_bytes": 1, "file": "f", "rollouts": 1, "tokens": 1,
            "fingerprint_digest": f"{lease.job.id}", "fingerprint": {}
        }  # fmt: skip
        insert_if_absent(session, tables.ScoreFile, row)


@pytest.mark.slow
def test_leases_hold_in_any_order_of_events(context: ServiceContext, clock: Clock) -> None:
    run_state_machine_as_test(
        lambda: LeaseMachine(context, clock),  # type: ignore[arg-type]  # any factory will do
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    context.database.close()


def test_jobs_of_a_probe_are_locked_in_one_order(context: ServiceContext, clock: Clock) -> None:
    machine = LeaseMachine(context, clock)
    probe = next(iter(machine.jobs.values()))
    locked = context.database.write(lambda session: [job.id for job in probes.lock_jobs(session, probe)])
    assert locked == sorted(job for job, of in machine.jobs.items() if of == probe)
    context.database.close()
