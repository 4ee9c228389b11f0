"""Measure a stored step again: its shards from their token files, its replayed scores from theirs.

Everything is computed first; then one transaction per step replaces it, after a check that nothing has arrived since.
So it may run beside the service or twice at once, and may be interrupted: each step has either its old or its new
measures. On SQLite the service's transactions wait for milliseconds.

The same token files give the same statistics. Alerts and advice that were based on the old values stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from sqlalchemy import ColumnElement, exists, func, or_, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from foreshock.commands.text import Progress
from foreshock.errors import ConfigurationError, ForeshockError
from foreshock.measures.registry import COMPARISON_MEASURES
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock_service.maintenance.stored_files import maintenance_context, run_called
from foreshock_service.platform import problem, settings
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database import engine, tables
from foreshock_service.platform.decoding.pool import DecoderPool
from foreshock_service.replay.attribution import compute, service
from foreshock_service.runs import events, judging, shard_decoding, shards, steps
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.runs import lock_run_for_background

_TRIES = 5


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of a step; `left` is the reason why a part was left unchanged, None if no part was."""

    key: events.StepKey
    left: str | None = None


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step as it is stored: the shards in order, what their files hold, and its scores."""

    files: tuple[tables.Shard, ...] = field(compare=False)
    contents: tuple[tuple[int, str, int | None], ...]
    # None if tokens were removed: then nothing is measured again.
    scored: service.AttributionInputs | None

    @classmethod
    def read(cls, context: ServiceContext, session: Session, key: events.StepKey) -> _Stored:
        files = tuple(shards.shards_of_step(session, key))
        contents = tuple((each.shard, each.file, each.tokens_purged_at_us) for each in files)
        whole = all(file.tokens_purged_at_us is None for file in files)
        return cls(files, contents, service.attribution_inputs(context, session, key) if whole else None)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A step as it is measured now: its shards, their folds, and the attribution of its scores (None: not replaced)."""

    stored: _Stored
    shards: tuple[shard_decoding.MeasuredShard, ...]
    folded: shard_decoding.FoldedStep
    attribution: compute.AttributionResult | None


def remeasure_step(context: ServiceContext, key: events.StepKey) -> StepReport:
    """Measure a step again and replace its stored measures; what cannot be measured is left unchanged and reported."""
    with RunIsolated(context.database, context.events, key.run_id, f"measure its step {key.step} again"):
        return _remeasure_step(context, key)
    return StepReport(key, "its stored state cannot be read; the page of its run and the log say why")


def _remeasure_step(context: ServiceContext, key: events.StepKey) -> StepReport:
    try:
        for _ in range(_TRIES):
            with context.database.read() as session:
                stored = _Stored.read(context, session, key)
            gone = _removed(stored.files) or gone_files(context, stored.files)
            if gone:
                return StepReport(key, gone)
            measured, gone = _measure(context, key, stored)
            if context.database.write(partial(_replace, context, key, measured)):
                return StepReport(key, gone or _still_old(context, key))
        return StepReport(key, "rollouts or scores of it kept arriving: run it again")
    except OSError as error:
        return StepReport(key, f"a file of it cannot be read: {error}")
    except MemoryError:
        return StepReport(key, "it needs more memory than FORESHOCK_DECODE_MEMORY_BYTES allows")
    except (ForeshockError, problem.ProblemError) as error:
        return StepReport(key, str(error))
    except OperationalError as error:
        return StepReport(key, f"the database refused the transaction: {error.orig}; run it again")


def check_step(context: ServiceContext, key: events.StepKey) -> StepReport:
    """Return the report of `remeasure_step` on the step's files, without measuring."""
    with context.database.read() as session:
        stored = _Stored.read(context, session, key)
    return StepReport(key, _removed(stored.files) or gone_files(context, stored.files) or _gone_scores(stored.scored))


def _removed(files: Sequence[tables.Shard]) -> str | None:
    """Return why a step cannot be measured again although nothing is missing; None if it can."""
    return f"{shards.PURGED}; its measures stay" if any(file.tokens_purged_at_us for file in files) else None


def gone_files(context: ServiceContext, files: Sequence[tables.Shard]) -> str | None:
    """Describe the missing token files; None if all exist."""
    gone = [file for file in files if not context.store.file(file.file).exists()]
    if not gone:
        return None
    return f"{len(gone)} of its {len(files)} token files are missing, such as {gone[0].file}"


def _measure(context: ServiceContext, key: events.StepKey, stored: _Stored) -> tuple[_Measured, str | None]:
    """Return the step as it is measured now, and a description of missing scores."""
    measured = tuple(shards.measure_again(context, file) for file in stored.files)
    measurements = shard_decoding.fold_step(part for shard in measured for part in shard.parts)
    folded = shard_decoding.FoldedStep(
        measurements, judging.judge_step(key.step, key.attempt, [shard.lint for shard in measured])
    )
    gone = _gone_scores(stored.scored)
    attribution = None
    scored = stored.scored
    if scored is not None and scored.scores and gone is None:
        attribution = context.decoders.run(
            compute.attribute_step, scored.rollouts, scored.scores, scored.attempt_fingerprint
        )
    return _Measured(stored, measured, folded, attribution), gone


def _replace(context: ServiceContext, key: events.StepKey, measured: _Measured, session: Session) -> bool:
    """Replace everything in this transaction; False if the step has changed since it was measured."""
    if lock_run_for_background(session, key.run_id) is None:
        return True
    if _Stored.read(context, session, key) != measured.stored:
        return False
    numbers = [file.shard for file in measured.stored.files]
    shards.replace_shards(session, key, list(zip(numbers, measured.shards, strict=True)))
    if steps.is_closed(session, key):
        shards.store_fold(session, key, measured.folded, again=True)
    if measured.attribution is not None and measured.stored.scored is not None:
        service.store_attribution(context, session, key, measured.stored.scored.version, measured.attribution)
    return True


def _gone_scores(scored: service.AttributionInputs | None) -> str | None:
    if scored is None:
        return None
    gone = [score.file.name for score in scored.scores if not score.file.exists()]
    if not gone:
        return None
    return f"{len(gone)} files of its replayed scores are missing, such as {gone[0]}; their measures are unchanged"


def _still_old(context: ServiceContext, key: events.StepKey) -> str | None:
    """Describe the comparisons that can no longer be computed from stored data."""
    table = tables.MeasurementStatistics
    query = select(table.comparison).where(engine.of_step(table, key), table.statistics_version != STATISTICS_VERSION)
    with context.database.read() as session:
        old = session.scalars(query.order_by(table.comparison)).all()
    return f"its scores no longer give {', '.join(old)}" if old else None


@dataclass(frozen=True, slots=True)
class Request:
    """A run by id, key or name, its attempt and step; None: all. `everything`: also steps that are up to date."""

    run: str | None = None
    attempt: int | None = None
    step: int | None = None
    everything: bool = False
    dry_run: bool = False


_COUNTS = [measure.column for measure in COMPARISON_MEASURES if measure.column_type == "integer"]


def steps_to_measure(session: Session, run_id: str | None, request: Request) -> list[events.StepKey]:
    """Return the requested steps of a run (None: of every run), in order."""
    query = select(tables.Step.run_id, tables.Step.attempt, tables.Step.step).join(
        tables.Run, tables.Run.id == tables.Step.run_id
    )
    query = query.where(tables.Run.deleted_at_us.is_(None))
    for column, wanted in (
        (tables.Step.run_id, run_id),
        (tables.Step.attempt, request.attempt),
        (tables.Step.step, request.step),
    ):
        if wanted is not None:
            query = query.where(column == wanted)
    if not request.everything:
        old = _of_another_version(tables.ShardStatistics) | _of_another_version(tables.MeasurementStatistics)
        query = query.where(old | _without_newest_measures())
    ordered = query.order_by(tables.Run.created_at_us, tables.Step.run_id, tables.Step.attempt, tables.Step.step)
    return [events.StepKey(*row) for row in session.execute(ordered)]


def _without_newest_measures() -> ColumnElement[bool]:
    """Return the condition that a comparison of the step was measured before a column existed; counts are never NULL.

    A new measure without its own count is not found: `--everything` computes it for older steps.
    """
    columns = tables.measurements.c
    return exists().where(
        engine.of_step(columns, tables.Step),
        columns.tokens.is_not(None),
        or_(*(columns[name].is_(None) for name in _COUNTS)),
    )


def _of_another_version(
    table: type[tables.ShardStatistics] | type[tables.MeasurementStatistics],
) -> ColumnElement[bool]:
    return exists().where(engine.of_step(table, tables.Step), table.statistics_version != STATISTICS_VERSION)


def remeasure(request: Request, decoders: DecoderPool | None = None) -> int:
    """Measure the requested steps again; return 0 if nothing was left unchanged, else 1. Raises ConfigurationError.

    `decoders` is a pool to share; None: it makes one.
    """
    with maintenance_context(settings.load_settings(), decoders) as context:
        keys = _chosen(context, request)
        if not keys:
            print(f"nothing to do: all statistics are of version {STATISTICS_VERSION}, which this release reads")
            return 0
        print(_extent(context, keys), flush=True)
        if request.dry_run:
            left = [report for report in map(partial(check_step, context), keys) if report.left is not None]
            _show(left)
            print(f"{len(keys) - len(left)} of {len(keys)} steps would be measured again; nothing was changed")
        else:
            left = _measure_all(context, keys)
            print(f"{len(keys) - len(left)} of {len(keys)} steps were measured again")
    return 1 if left else 0


def _measure_all(context: ServiceContext, keys: Sequence[events.StepKey]) -> list[StepReport]:
    """Measure the steps again, as many at once as there are decoders; return the reports of incomplete ones."""
    progress = Progress("measuring again", len(keys))
    if not context.decoders.is_warm:
        context.decoders.warm_up()
    left: list[StepReport] = []
    with ThreadPoolExecutor(context.settings.decode_processes) as threads:
        done = 0
        try:
            for report in threads.map(partial(remeasure_step, context), keys):
                done += 1
                progress.show(done)
                if report.left is not None:
                    left.append(report)
        except BaseException:
            # Interrupted: finish the running steps, start no other.
            threads.shutdown(cancel_futures=True)
            print(f"\nended early, after {done} of {len(keys)} steps: run it again to continue", file=sys.stderr)
            raise
    _show(left)
    return left


def _chosen(context: ServiceContext, request: Request) -> list[events.StepKey]:
    with context.database.read() as session:
        run_id = run_called(session, request.run).id if request.run is not None else None
        keys = steps_to_measure(session, run_id, request)
        everything = replace(request, everything=True)
        if not keys and request.step is not None and not steps_to_measure(session, run_id, everything):
            raise ConfigurationError(f"there is no step {request.step}")
    return keys


def _extent(context: ServiceContext, keys: Sequence[events.StepKey]) -> str:
    files = size = 0
    totals = select(func.count(), func.coalesce(func.sum(tables.Shard.file_bytes), 0))
    with context.database.read() as session:
        for key in keys:
            count, file_bytes = session.execute(totals.where(engine.of_step(tables.Shard, key))).one()
            files, size = files + count, size + int(file_bytes)  # PostgreSQL: a Decimal
    runs = len({key.run_id for key in keys})
    return f"{len(keys)} steps of {runs} runs, {files} token files of {size / 1e6:,.1f} MB together"


def _show(left: Iterable[StepReport]) -> None:
    for report in left:
        run_id, attempt, step = report.key
        print(f"left: run {run_id}, attempt {attempt}, step {step}: {report.left}", file=sys.stderr)
