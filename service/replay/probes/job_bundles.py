"""The bundles of scorers that make the jobs of a probe, and the reason why a queued job waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from foreshock.probe_kinds import PROBE_KINDS
from foreshock.scorers import EXACT_PAIRS, SCORERS
from foreshock_service.platform.database.tables.base import new_identifier
from foreshock_service.platform.database.tables.probes import Probe, ProbeJob, Worker
from foreshock_service.replay.probes.environments import WantedEnvironment, names_in_words
from foreshock_service.replay.probes.jobs import LIVE_MINUTES, JobState, Priority, set_priority
from foreshock_service.replay.probes.schemas import ScorerRequest


def new_jobs(
    probe: Probe,
    scorers: Sequence[ScorerRequest],
    live: Iterable[Worker],
    now_us: int,
    wanted: Mapping[str, WantedEnvironment] | None = None,
    exact_pairs: Sequence[str] = (),
    priority: Priority = Priority.NORMAL,
) -> list[ProbeJob]:
    """Return the jobs of a new probe; `wanted` has the environments of each engine's job.

    An exact pair is a job of its own, in the environment of its behaviour's engine.

    An engine is started once for all scorers of a job, so that there is one job for each engine. A scorer that no live
    worker offers gets a job of its own if live workers offer other scorers of its engine: those do not wait for it.
    A probe of a kind that needs more of its worker than scorers is one job.
    """
    jobs = _bundles(probe, scorers, live, now_us, wanted, exact_pairs)
    for job in jobs:
        set_priority(job, priority)
    return jobs


def _bundles(
    probe: Probe,
    scorers: Sequence[ScorerRequest],
    live: Iterable[Worker],
    now_us: int,
    wanted: Mapping[str, WantedEnvironment] | None,
    exact_pairs: Sequence[str],
) -> list[ProbeJob]:
    offers = _offers(live, probe.accelerator)
    names = sorted({each.scorer for each in scorers})
    kind = PROBE_KINDS[probe.kind]
    if kind.capability:
        # An engine's environment comes first, as in an exact pair.
        engine = min((str(SCORERS[name].engine) for name in names), key=lambda engine: engine == "torch")
        environment = (wanted or {}).get(engine, WantedEnvironment())
        label = engine if kind.sends_scores else kind.name
        return [_job(probe, label, {*names, kind.capability}, scorers, environment, now_us)]
    engines = sorted({str(SCORERS[name].engine) for name in names})
    jobs = []
    for engine in engines:
        environment = (wanted or {}).get(engine, WantedEnvironment())
        of_engine = {name for name in names if SCORERS[name].engine == engine}
        together = _done_together(of_engine, offers)
        jobs.append(_job(probe, engine, together, scorers, environment, now_us))
        jobs += [_job(probe, name, {name}, scorers, environment, now_us) for name in sorted(of_engine - together)]
    return jobs + [_exact_job(probe, pair, wanted or {}, now_us) for pair in exact_pairs]


def scored_by(job: ProbeJob) -> list[dict[str, str]]:
    """Return the scorers and variants whose log-probs the job's worker sends."""
    kind = PROBE_KINDS.get(job.engine)
    return job.scorers if kind is None or kind.sends_scores else []


def waiting_reason(job: ProbeJob, live: Iterable[Worker]) -> str | None:
    """Return the scorers that a queued job waits for; None if a live worker can do the job."""
    needs = set(job.needs.split(","))
    live = list(live)
    wanted = WantedEnvironment.stored(job.environments, job.environment_required)
    offers = _offers(live, job.accelerator)
    if any(needs <= offered for offered in offers):
        if not (wanted.is_required and wanted.names) or any(
            needs <= offers_of(worker) and wanted.best_of(worker.environments) is not None
            for worker in live
            if job.accelerator in (None, worker.accelerator)
        ):
            return None
        return (
            f"waiting for a worker that offers {job.needs.replace(',', ', ')} in the environment "
            f"{names_in_words(wanted.names)}: no live worker does"
        )
    missing = [
        EXACT_PAIRS[name].name if name in EXACT_PAIRS else name for name in sorted(needs.difference(*offers) or needs)
    ]
    on = f" on {job.accelerator}" if job.accelerator is not None else ""
    return (
        f"waiting for a worker that offers {', '.join(missing)}{on}: "
        f"none was seen in the last {LIVE_MINUTES} minutes; start one with `foreshock worker`"
    )


def offers_of(worker: Worker) -> frozenset[str]:
    """Return the names of the scorers and the keys of the exact pairs that the worker offers."""
    return frozenset([*worker.scorers, *worker.exact_pairs])


def _offers(live: Iterable[Worker], accelerator: str | None) -> list[frozenset[str]]:
    return [offers_of(worker) for worker in live if accelerator in (None, worker.accelerator)]


def _done_together(names: set[str], offers: Sequence[frozenset[str]]) -> set[str]:
    """Return the scorers of one job: those that one live worker offers; all if no live worker offers any of them."""
    return max((names & offered for offered in offers), key=len, default=set()) or names


def _job(
    probe: Probe,
    label: str,
    names: set[str],
    scorers: Sequence[ScorerRequest],
    wanted: WantedEnvironment,
    now_us: int,
) -> ProbeJob:
    job = _new_job(probe, label, sorted(names), wanted, now_us)
    job.scorers = [each.model_dump() for each in scorers if each.scorer in names]
    return job


def _exact_job(probe: Probe, pair: str, wanted: Mapping[str, WantedEnvironment], now_us: int) -> ProbeJob:
    engine = str(SCORERS[EXACT_PAIRS[pair].behaviour].engine)
    job = _new_job(probe, f"exact.{pair}", [pair], wanted.get(engine, WantedEnvironment()), now_us)
    job.exact_pairs = [pair]
    return job


def _new_job(probe: Probe, label: str, needs: Sequence[str], wanted: WantedEnvironment, now_us: int) -> ProbeJob:
    return ProbeJob(
        id=new_identifier("job"),
        probe_id=probe.id,
        engine=label,
        scorers=[],
        exact_pairs=[],
        needs=",".join(needs),
        accelerator=probe.accelerator,
        environments=wanted.text(),
        environment_required=wanted.is_required,
        environment=None,
        state=JobState.QUEUED,
        tries=0,
        fencing_token=0,
        lease_id=None,
        lease_expires_at_us=None,
        worker=None,
        reason=None,
        reasons=[],
        queued_at_us=now_us,
        finished_at_us=None,
    )
