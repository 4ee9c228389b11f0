"""The jobs of a probe: their scorers, states, transitions and rank in the queue. No function queries the database.

    queued ──claim──▶ running ──complete──▶ done
      ▲                 │ ├──fail final────▶ failed    (and the probe's other jobs with it)
      │                 │ └──fail skipped──▶ skipped   (and the probe's other jobs with it)
      └─fail retry, lease expired─┘ (after the last try: failed, "poisoned", with every try's reason)

A claim raises the job's fencing token by one. Only the holder of the newest token may change a job: a worker that comes
back late is refused.

Of two queued jobs the older one comes first; an urgent one counts as queued a day earlier, so that no job waits for
ever.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType

from foreshock.probe_kinds import PROBE_KINDS
from foreshock.scorers import EXACT_PAIRS, SCORERS
from foreshock_service.platform.database.tables import Lease, Probe, ProbeJob, Worker, new_identifier
from foreshock_service.replay.probes.environments import WantedEnvironment, names_in_words

# A worker is live if it asked for a job or sent a heartbeat within this time. A lease request waits 60 s at most.
LIVE_MINUTES = 5
LONGEST_REASON = 2_000


class JobState(StrEnum):
    """The state of a job or of a probe."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Outcome(StrEnum):
    """The end of a lease."""

    COMPLETED = "completed"
    RETRY = "retry"
    FINAL = "final"
    SKIPPED = "skipped"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.SKIPPED})
# The outcomes that the exporter counts as failures.
FAILURES = (Outcome.RETRY, Outcome.FINAL, Outcome.EXPIRED)


HEAD_START_US = 24 * 3_600 * 1_000_000
"""The lead of an urgent job, in microseconds of waiting."""


class Priority(StrEnum):
    """The priority of a job. `urgent`: the default for steps near an open alert."""

    NORMAL = "normal"
    URGENT = "urgent"


def claim(job: ProbeJob, lease: Lease, ends_at_us: int, environment: str | None) -> None:
    """Give the queued job to the lease's worker until `ends_at_us`; the lease gets the new fencing token.

    `environment` is the one that the worker scores it in; None: the worker's default.
    """
    job.state = JobState.RUNNING
    job.tries += 1
    job.fencing_token += 1
    job.lease_id, lease.token = lease.id, job.fencing_token
    job.worker = lease.worker
    job.environment = environment
    job.lease_expires_at_us = ends_at_us


def end(
    job: ProbeJob, lease: Lease | None, outcome: Outcome, state: JobState, now_us: int, reason: str | None = None
) -> None:
    """End a job and its lease (None: it is not leased), whose holder is fenced off."""
    if lease is not None:
        lease.outcome = outcome
    job.lease_id = job.lease_expires_at_us = None
    job.state, job.finished_at_us = state, now_us
    job.reason = None if reason is None else _short(reason)


def fail(job: ProbeJob, lease: Lease, outcome: Outcome, reason: str, now_us: int, most_tries: int) -> None:
    """Record a try that failed or expired. RETRY, EXPIRED: queue the job again, unless it was the last try.

    Another try cannot do the job if the outcome is FINAL, or SKIPPED: its weights are gone.
    """
    job.reasons = [*job.reasons, _short(f"try {lease.token} on {lease.worker}: {reason}")]
    if outcome not in (Outcome.RETRY, Outcome.EXPIRED):
        state = JobState.SKIPPED if outcome is Outcome.SKIPPED else JobState.FAILED
        end(job, lease, outcome, state, now_us, reason)
    elif job.tries >= most_tries:
        end(job, lease, outcome, JobState.FAILED, now_us, f"given up after {job.tries} tries; last: {reason}")
    else:
        # `queued_at_us` and `rank_us` stay: the job keeps its place in the queue.
        job.state, lease.outcome = JobState.QUEUED, outcome
        job.worker = job.lease_id = job.lease_expires_at_us = None


def requeue(job: ProbeJob, now_us: int) -> None:
    """Queue an ended job again with all its tries. The fencing token keeps counting."""
    job.state, job.tries = JobState.QUEUED, 0
    job.reason = job.worker = job.environment = job.finished_at_us = None
    job.queued_at_us, job.rank_us = now_us, _rank_us(now_us, job.priority)


def state_of_probe(jobs: list[ProbeJob]) -> tuple[JobState, str | None]:
    """Return a probe's state and reason, from those of its jobs."""
    states = {JobState(job.state) for job in jobs}
    if states <= ENDED:
        for state in (JobState.FAILED, JobState.SKIPPED):
            if state in states:
                return state, next((job.reason for job in jobs if job.state == state), None)
        return JobState.DONE, None
    return (JobState.QUEUED if states == {JobState.QUEUED} else JobState.RUNNING), None


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _rank_us(queued_at_us: int, priority: str) -> int:
    """Return the rank of a queued job in microseconds; the job with the lowest rank is leased first."""
    return queued_at_us - HEAD_START_US if priority == Priority.URGENT else queued_at_us


def new_jobs(
    probe: Probe,
    live: Iterable[Worker],
    now_us: int,
    wanted: Mapping[str, WantedEnvironment] = MappingProxyType({}),
    *,
    is_near_alert: bool = False,
) -> list[ProbeJob]:
    """Return the jobs of a new probe; `wanted` has the environments of each engine's job.

    A job starts its engine once for all of its scorers, so each engine gets one job. The job has the scorers that one
    live worker offers; each other scorer of the engine gets a job of its own, so that the job does not wait for it.
    An exact pair is a job of its own, in the environment of its behaviour's engine. A probe of a kind with a capability
    is one job.
    """
    priority = probe.priority or (Priority.URGENT if is_near_alert else Priority.NORMAL)
    kind, names = PROBE_KINDS[probe.kind], {each["scorer"] for each in probe.scorers}
    # Label, engine, needs and exact pairs of each job.
    parts: list[tuple[str, str, set[str], list[str]]] = []
    if kind.capability:
        # Another engine's environment takes precedence over that of torch.
        engine = min((str(SCORERS[name].engine) for name in sorted(names)), key=lambda engine: engine == "torch")
        parts.append((engine if kind.sends_scores else kind.name, engine, {*names, kind.capability}, []))
    else:
        offers = [_offers_of(each) for each in live if probe.accelerator in (None, each.accelerator)]
        for engine in sorted({str(SCORERS[name].engine) for name in names}):
            of_engine = {name for name in names if SCORERS[name].engine == engine}
            # Most scorers that one live worker offers; all if no live worker offers any of them.
            together = max((of_engine & offered for offered in offers), key=len, default=set()) or of_engine
            parts.append((engine, engine, together, []))
            parts += [(name, engine, {name}, []) for name in sorted(of_engine - together)]
        for pair in probe.exact_pairs:
            parts.append((f"exact.{pair}", str(SCORERS[EXACT_PAIRS[pair].behaviour].engine), {pair}, [pair]))
    jobs = []
    for label, engine, needs, pairs in parts:
        environment = wanted.get(engine, WantedEnvironment())
        jobs.append(
            ProbeJob(
                id=new_identifier("job"),
                probe_id=probe.id,
                engine=label,
                scorers=[each for each in probe.scorers if each["scorer"] in needs],
                exact_pairs=pairs,
                needs=sorted(needs),
                accelerator=probe.accelerator,
                environments=list(environment.names),
                environment_required=environment.is_required,
                state=JobState.QUEUED,
                tries=0,
                fencing_token=0,
                reasons=[],
                priority=priority,
                queued_at_us=now_us,
                rank_us=_rank_us(now_us, priority),
            )
        )
    return jobs


def scored_by(job: ProbeJob) -> list[dict[str, str]]:
    """Return the scorers and variants whose log-probs the job's worker sends."""
    kind = PROBE_KINDS.get(job.engine)
    return job.scorers if kind is None or kind.sends_scores else []


def waiting_reason(job: ProbeJob, live: Iterable[Worker]) -> str | None:
    """Return a sentence about the scorers that a queued job waits for; None if a live worker can do the job."""
    needs = set(job.needs)
    able = [worker for worker in live if job.accelerator in (None, worker.accelerator)]
    wanted = WantedEnvironment(job.environments, job.environment_required)
    offering = [worker for worker in able if needs <= _offers_of(worker)]
    if any(wanted.accepts(worker.environments) for worker in offering):
        return None
    if offering:
        return (
            f"waiting for a worker that offers {', '.join(job.needs)} in the environment "
            f"{names_in_words(wanted.names)}: no live worker does"
        )
    missing = [
        EXACT_PAIRS[name].name if name in EXACT_PAIRS else name
        for name in sorted(needs.difference(*map(_offers_of, able)) or needs)
    ]
    on = f" on {job.accelerator}" if job.accelerator is not None else ""
    return (
        f"waiting for a worker that offers {', '.join(missing)}{on}: "
        f"none was seen in the last {LIVE_MINUTES} minutes; start one with `foreshock worker`"
    )


def _offers_of(worker: Worker) -> frozenset[str]:
    """Return the names of the scorers and the keys of the exact pairs that the worker offers."""
    return frozenset([*worker.scorers, *worker.exact_pairs])
