"""The configuration matrix of a step: its cells are probes of the kind `matrix`, measured when they are read."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock import comparisons, configuration_grid, json_values, probe_kinds, scorers
from foreshock.api.records import from_attributes
from foreshock.api.replays import MatrixCellRecord, MatrixPairRecord, MatrixRecord, MismatchRecord
from foreshock.diagnosis.configurations import MeasuredSetting, Setting, recommend
from foreshock_service.platform import parameters, problem, security
from foreshock_service.platform.context import Context, ServiceContext
from foreshock_service.platform.database.engine import database_now_us, of_step
from foreshock_service.platform.database.tables import Lease, Probe, ProbeJob, ScoreShard
from foreshock_service.replay.probes import pinned_rollouts, service, workers
from foreshock_service.replay.probes.jobs import JobState, waiting_reason
from foreshock_service.replay.results.files import CellFiles, CellMeasures, MeasuredCells, measure_cells
from foreshock_service.runs import attempts, events, run_endpoints, runs

router = parameters.api_router(prefix="/v1", tags=["probes"])

# Cells of older rollouts and those on several kinds of hardware are read too.
_MOST_READ = 4 * configuration_grid.MOST_CELLS
_MOST_PAIRS = 256


class MatrixNotFound(problem.ProblemError, status=404, problem_type="matrix-not-found"):
    """The step has no configuration matrix: request one with `foreshock probe matrix`."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A probe of the kind `matrix` with what is known before it is measured."""

    probe: Probe
    job: ProbeJob
    hardware: str
    options: dict[str, Any]
    reason: str | None
    files: CellFiles | None

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
) -> MatrixRecord:
    """Return hardware × configuration of a step: mismatch and cost of each cell, and what is recommended.

    The cells are probes of the kind `matrix`; 404 `matrix-not-found` if none was requested.
    """
    with context.database.read() as session:
        cells, others, rollouts = _cells(context, session, principal, run, step, attempt)
    scored = [cell.files for cell in cells if cell.files is not None]
    reference = next((cell for cell in cells if cell.scorer == scorers.REFERENCE and cell.files is not None), None)
    pairs = _pairs(cells, reference)
    with problem.present_file(f"a score of the matrix of step {step}"):
        measured = context.decoders.run(measure_cells, rollouts, scored, pairs) if scored else None
    changed = _changed(cells)
    first = cells[0].probe
    return from_attributes(
        MatrixRecord,
        first,
        run=first.run_id,
        reference=reference.id if reference is not None else None,
        cells=tuple(_cell_read(cell, changed[cell.id], measured, reference) for cell in cells),
        pairs=tuple(_pair_reads(cells, measured, reference)),
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
    """Return the cells over the rollouts and weights of the newest one, oldest first; the number of others."""
    run = runs.get_run(session, principal, run_id)
    key = attempts.resolve_step(session, run_id, step, attempt)
    found = newest_cells(session, key, _MOST_READ)
    if not found:
        raise MatrixNotFound(
            f"step {key.step} of attempt {key.attempt} has no configuration matrix; "
            f"request one with `foreshock probe matrix {run.key} --step {key.step}`"
        )
    newest = found[0][0]
    same = [each for each in found if _over(each[0]) == _over(newest)]
    jobs = [job.id for _, job in same]
    leases = newest_leases(session, jobs)
    files = defaultdict(list)
    for shard in shards_of_jobs(session, jobs):
        files[shard.job_id].append(context.store.file(shard.file))
    live = workers.live_workers(session, run.project, database_now_us(session))
    cells = []
    for probe, job in reversed(same):
        done = job.state == JobState.DONE and files[job.id]
        cells.append(
            _Cell(
                probe=probe,
                job=job,
                hardware=_hardware(probe, job, leases.get(job.id)),
                options=dict(next(iter(probe.options.values()), {})),
                reason=job.reason or (waiting_reason(job, live) if job.state == JobState.QUEUED else None),
                files=CellFiles(probe.id, tuple(files[job.id])) if done else None,
            )
        )
    return cells, len(found) - len(same), service.rollouts_of_probe(context, session, newest)


def _over(probe: Probe) -> tuple[str, Any]:
    return probe.rollout_set_digest, probe.checkpoint["digest"]


def _hardware(probe: Probe, job: ProbeJob, lease: Lease | None) -> str:
    """Return where a cell was scored, or asked to be."""
    where = [lease.accelerator, lease.device_name] if lease is not None else [probe.accelerator or "any"]
    environment = job.environment if lease is not None else probe.environment
    return ", ".join([*dict.fromkeys(where), *([environment] if environment else [])])


def _pairs(cells: Sequence[_Cell], reference: _Cell | None) -> list[tuple[str, str]]:
    """Return (target, behaviour) of what is compared: the reference with each, the trainer's with the engine's."""
    scored = [cell for cell in cells if cell.files is not None]
    pairs = [(reference.id, cell.id) for cell in scored if cell is not reference] if reference is not None else []
    sides = {
        side: [cell for cell in scored if scorers.SCORERS[cell.scorer].side == side] for side in ("engine", "trainer")
    }
    pairs += [
        (trainer.id, engine.id)
        for trainer in sides["trainer"]
        for engine in sides["engine"]
        if trainer.hardware == engine.hardware
    ]
    return pairs[:_MOST_PAIRS]


def _changed(cells: Sequence[_Cell]) -> dict[str, dict[str, Any]]:
    """Return the options of each cell that differ from those of its scorer's baseline: the plainest, oldest cell."""
    baseline: dict[str, _Cell] = {}
    for cell in cells:
        before = baseline.get(cell.scorer)
        if before is None or len(cell.options) < len(before.options):
            baseline[cell.scorer] = cell
    return {cell.id: _difference(baseline[cell.scorer].options, cell.options) for cell in cells}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


def _cell_read(
    cell: _Cell, changed: dict[str, Any], measured: MeasuredCells | None, reference: _Cell | None
) -> MatrixCellRecord:
    seconds = measured.seconds_per_token.get(cell.id) if measured is not None else None
    found = _measures_of(measured, reference.id if reference is not None else "", cell.id)
    return from_attributes(
        MatrixCellRecord,
        cell,
        probe=cell.id,
        changed=changed,
        state=JobState(cell.job.state).value,
        against_reference=_mismatch(found, scorers.REFERENCE, cell.scorer) if found is not None else None,
        seconds_per_token=json_values.number_or_nan(seconds),
    )


def _measures_of(measured: MeasuredCells | None, target: str, behaviour: str) -> CellMeasures | None:
    pairs = measured.pairs if measured is not None else ()
    return next((each for each in pairs if (each.target, each.behaviour) == (target, behaviour)), None)


def _mismatch(found: CellMeasures, target: str, behaviour: str) -> MismatchRecord:
    return from_attributes(MismatchRecord, found, comparison=comparisons.comparison_name(target, behaviour))


def _pair_reads(
    cells: Sequence[_Cell], measured: MeasuredCells | None, reference: _Cell | None
) -> list[MatrixPairRecord]:
    names = {cell.id: cell.scorer for cell in cells}
    return [
        MatrixPairRecord(
            trainer=each.target, engine=each.behaviour,
            mismatch=_mismatch(each, names[each.target], names[each.behaviour]),
        )
        for each in (measured.pairs if measured is not None else ())
        if reference is None or each.target != reference.id
    ]  # fmt: skip


def _recommendations(
    cells: Sequence[_Cell],
    changed: Mapping[str, dict[str, Any]],
    measured: MeasuredCells | None,
    reference: _Cell | None,
) -> list[str]:
    """Return a sentence for each hardware and pair of scorers; of a side alone, against the reference."""
    if measured is None:
        return []
    of = {cell.id: cell for cell in cells}
    groups: defaultdict[tuple[str, str], list[MeasuredSetting]] = defaultdict(list)
    paired = {(of[each.behaviour].hardware) for each in measured.pairs if not _is(reference, each.target)}
    for each in measured.pairs:
        target, behaviour = of[each.target], of[each.behaviour]
        if _is(reference, each.target):
            if behaviour.hardware in paired or scorers.SCORERS[behaviour.scorer].side is None:
                continue
            varied: tuple[_Cell, ...] = (behaviour,)
        else:
            varied = (behaviour, target)
        name = comparisons.comparison_name(target.scorer, behaviour.scorer)
        settings = tuple(
            Setting(cell.scorer, changed[cell.id], measured.seconds_per_token.get(cell.id)) for cell in varied
        )
        setting = MeasuredSetting(name, settings, each.k3_kl, each.low, each.high)
        groups[behaviour.hardware, name].append(setting)
    found = [(hardware, recommend(settings)) for (hardware, _), settings in groups.items()]
    return [f"{hardware}: {sentence}" for hardware, sentence in found if sentence is not None]


def _is(reference: _Cell | None, cell: str) -> bool:
    return reference is not None and reference.id == cell


def newest_cells(session: Session, key: events.StepKey, most: int) -> list[tuple[Probe, ProbeJob]]:
    """Return up to `most` cells of a step with their jobs, the newest first."""
    query = select(Probe, ProbeJob).join(ProbeJob, ProbeJob.probe_id == Probe.id)
    query = query.where(of_step(Probe, key))
    query = query.where(Probe.kind == probe_kinds.MATRIX.name)
    rows = session.execute(query.order_by(Probe.created_at_us.desc(), Probe.id.desc()).limit(most))
    return [(probe, job) for probe, job in rows]


def shards_of_jobs(session: Session, job_ids: Collection[str]) -> Sequence[ScoreShard]:
    """Return the score shards of jobs, of the newest try of each."""
    query = select(ScoreShard).join(ProbeJob, ProbeJob.id == ScoreShard.job_id)
    query = query.where(ScoreShard.job_id.in_(job_ids), ScoreShard.token == ProbeJob.fencing_token)
    return session.scalars(query.order_by(ScoreShard.job_id, ScoreShard.shard)).all()


def newest_leases(session: Session, job_ids: Collection[str]) -> dict[str, Lease]:
    """Return the lease of the newest try of each job, by job id."""
    query = select(Lease).join(ProbeJob, ProbeJob.id == Lease.job_id)
    query = query.where(Lease.job_id.in_(job_ids), Lease.token == ProbeJob.fencing_token)
    return {lease.job_id: lease for lease in session.scalars(query)}
