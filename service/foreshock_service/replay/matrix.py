"""The configuration matrix of a step. Its cells are probes of the kind `matrix`; a read measures them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock import comparisons, configuration_grid, json_values, probe_kinds, scorers
from foreshock.api import records, replays
from foreshock.diagnosis.configurations import MeasuredSetting, Setting, recommend
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import database_now_us, of_step
from foreshock_service.platform.database.tables import Lease, Probe, ProbeJob, ScoreShard
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.probes import pinned_rollouts, service, workers
from foreshock_service.replay.probes.jobs import JobState, waiting_reason
from foreshock_service.replay.results.files import MeasuredCells, measure_cells
from foreshock_service.runs import attempts, events, run_endpoints, runs

router = parameters.api_router(prefix="/v1", tags=["probes"])

# Cells of older rollouts and cells on several kinds of hardware are read too.
_MOST_READ = 4 * configuration_grid.MOST_CELLS
_MOST_PAIRS = 256


class MatrixNotFound(problem.ProblemError, status=404, problem_type="matrix-not-found"):
    """The step has no configuration matrix: request one with `foreshock probe matrix`."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A probe of the kind `matrix` before it is measured."""

    probe: Probe
    job: ProbeJob
    hardware: str
    options: dict[str, Any]
    reason: str | None
    files: tuple[StoredFile, ...]
    """empty until the job is done"""

    @property
    def id(self) -> str:
        return self.probe.id

    @property
    def scorer(self) -> str:
        return str(self.probe.scorers[0]["scorer"])


@router.get("/runs/{run}/steps/{step}/matrix")
def read_matrix(
    run: run_endpoints.RunIdentifier,
    step: parameters.StepPath,
    context: Context,
    principal: security.Reader,
    attempt: parameters.ActiveOrAttempt = None,
) -> replays.MatrixRecord:
    """Return hardware × configuration of a step: mismatch and cost of each cell, and what is recommended.

    The cells are probes of the kind `matrix`; 404 `matrix-not-found` if none was requested.
    """
    with context.database.read() as session:
        cells, others, rollouts = _cells(context, session, principal, run, step, attempt)
    scored = [cell for cell in cells if cell.files]
    reference = next((cell.id for cell in scored if cell.scorer == scorers.REFERENCE), None)
    pairs = _pairs(scored, reference)
    measured = MeasuredCells()
    with problem.present_file(f"a score of the matrix of step {step}"):
        if scored:
            measured = context.decoders.run(measure_cells, rollouts, {cell.id: cell.files for cell in scored}, pairs)
    changed = _changed(cells)
    first = cells[0].probe
    return records.from_attributes(
        replays.MatrixRecord,
        first,
        run=first.run_id,
        reference=reference,
        cells=tuple(
            records.from_attributes(
                replays.MatrixCellRecord,
                cell,
                probe=cell.id,
                changed=changed[cell.id],
                state=JobState(cell.job.state).value,
                against_reference=measured.pairs.get((reference or "", cell.id)),
                seconds_per_token=json_values.number_or_nan(measured.seconds_per_token.get(cell.id)),
            )
            for cell in cells
        ),
        pairs=tuple(
            replays.MatrixPairRecord(trainer=target, engine=behaviour, mismatch=found)
            for (target, behaviour), found in measured.pairs.items()
            if target != reference
        ),
        recommendations=tuple(_recommendations(cells, changed, measured, reference)),
        other_cells=others,
    )


def _cells(
    context: ServiceContext,
    session: Session,
    principal: security.Principal,
    run_id: str,
    step: int,
    attempt: int | None,
) -> tuple[list[_Cell], int, pinned_rollouts.PinnedRollouts]:
    """Return the cells with the rollouts and weights of the newest cell, oldest first.

    Also return the number of all other cells, and the rollouts.
    """
    run = runs.get_run(session, principal, run_id)
    key = attempts.resolve_step(session, run_id, step, attempt)
    found = newest_cells(session, key, _MOST_READ)
    if not found:
        raise MatrixNotFound(
            f"step {key.step} of attempt {key.attempt} has no configuration matrix; "
            f"request one with `foreshock probe matrix {run.key} --step {key.step}`"
        )
    newest = found[0][0]
    over = (newest.rollout_set_digest, newest.checkpoint["digest"])
    same = [each for each in found if (each[0].rollout_set_digest, each[0].checkpoint["digest"]) == over]
    jobs = [job.id for _, job in same]
    # The lease of each job's newest try.
    of_leases = select(Lease).join(ProbeJob, (ProbeJob.id == Lease.job_id) & (ProbeJob.fencing_token == Lease.token))
    leases = {lease.job_id: lease for lease in session.scalars(of_leases.where(Lease.job_id.in_(jobs)))}
    same_try = (ProbeJob.id == ScoreShard.job_id) & (ProbeJob.fencing_token == ScoreShard.token)
    of_shards = select(ScoreShard).join(ProbeJob, same_try).where(ScoreShard.job_id.in_(jobs))
    files = defaultdict(list)
    for shard in session.scalars(of_shards.order_by(ScoreShard.job_id, ScoreShard.shard)):
        files[shard.job_id].append(context.store.file(shard.file))
    live = workers.live_workers(session, run.project, database_now_us(session))
    cells = []
    for probe, job in reversed(same):
        cells.append(
            _Cell(
                probe=probe,
                job=job,
                hardware=_hardware(probe, job, leases.get(job.id)),
                options=dict(next(iter(probe.options.values()), {})),
                reason=job.reason or (waiting_reason(job, live) if job.state == JobState.QUEUED else None),
                files=tuple(files[job.id]) if job.state == JobState.DONE else (),
            )
        )
    return cells, len(found) - len(same), service.rollouts_of_probe(context, session, newest)


def _hardware(probe: Probe, job: ProbeJob, lease: Lease | None) -> str:
    """Return the hardware that scored a cell; before a lease, the hardware that it requests."""
    where = [lease.accelerator, lease.device_name] if lease is not None else [probe.accelerator or "any"]
    environment = job.environment if lease is not None else probe.environment
    return ", ".join([*dict.fromkeys(where), *([environment] if environment else [])])


def _pairs(scored: Sequence[_Cell], reference: str | None) -> dict[tuple[str, str], str]:
    """Return the comparison of each (target, behaviour): the reference with each, the trainer's with the engine's."""
    pairs = [(target, cell) for target in scored for cell in scored if target.id == reference != cell.id]
    sides = {
        side: [cell for cell in scored if scorers.SCORERS[cell.scorer].side == side] for side in ("engine", "trainer")
    }
    pairs += [
        (trainer, engine)
        for trainer in sides["trainer"]
        for engine in sides["engine"]
        if trainer.hardware == engine.hardware
    ]
    return {
        (target.id, behaviour.id): comparisons.comparison_name(target.scorer, behaviour.scorer)
        for target, behaviour in pairs[:_MOST_PAIRS]
    }


def _changed(cells: Sequence[_Cell]) -> dict[str, dict[str, Any]]:
    """Return the options of each cell that differ from those of its scorer's baseline: the plainest, oldest cell."""
    baseline: dict[str, _Cell] = {}
    for cell in cells:
        before = baseline.get(cell.scorer)
        if before is None or len(cell.options) < len(before.options):
            baseline[cell.scorer] = cell
    return {
        cell.id: {
            name: value
            for name, value in cell.options.items()
            if name not in baseline[cell.scorer].options or baseline[cell.scorer].options[name] != value
        }
        for cell in cells
    }


def _recommendations(
    cells: Sequence[_Cell], changed: Mapping[str, dict[str, Any]], measured: MeasuredCells, reference: str | None
) -> list[str]:
    """Return a sentence for each hardware and pair of scorers; of a side alone, against the reference."""
    of = {cell.id: cell for cell in cells}
    groups: defaultdict[tuple[str, str], list[MeasuredSetting]] = defaultdict(list)
    paired = {of[engine].hardware for target, engine in measured.pairs if target != reference}
    for ids, found in measured.pairs.items():
        target, behaviour = of[ids[0]], of[ids[1]]
        if target.id == reference:
            if behaviour.hardware in paired or scorers.SCORERS[behaviour.scorer].side is None:
                continue
            varied: tuple[_Cell, ...] = (behaviour,)
        else:
            varied = (behaviour, target)
        settings = tuple(
            Setting(cell.scorer, changed[cell.id], measured.seconds_per_token.get(cell.id)) for cell in varied
        )
        setting = MeasuredSetting(found.comparison, settings, found.k3_kl, found.low, found.high)
        groups[behaviour.hardware, found.comparison].append(setting)
    sentences = [(hardware, recommend(settings)) for (hardware, _), settings in groups.items()]
    return [f"{hardware}: {sentence}" for hardware, sentence in sentences if sentence is not None]


def newest_cells(session: Session, key: events.StepKey, most: int) -> list[tuple[Probe, ProbeJob]]:
    """Return up to `most` cells of a step with their jobs, the newest first."""
    query = select(Probe, ProbeJob).join(ProbeJob, ProbeJob.probe_id == Probe.id)
    query = query.where(of_step(Probe, key))
    query = query.where(Probe.kind == probe_kinds.MATRIX.name)
    rows = session.execute(query.order_by(Probe.created_at_us.desc(), Probe.id.desc()).limit(most))
    return [(probe, job) for probe, job in rows]
