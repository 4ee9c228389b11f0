"""Measure a stored step again: its shards from their token files, its replayed scores from theirs.

Everything is computed first; then one transaction per step replaces it, after a check that nothing has arrived since.
So it may run beside the service or twice at once, and may be interrupted: each step has either its old or its new
measures. On SQLite the service's transactions wait for milliseconds.

The same token files give the same statistics. Alerts and advice that were based on the old values stay.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from sqlalchemy import exists, or_, select
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
from foreshock_service.runs import events, shard_decoding, shards, steps
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.runs import lock_run_for_background

_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step as it is stored: the shards in order, what their files hold, and its scores."""

    shards: tuple[tables.Shard, ...] = field(compare=False)
    contents: tuple[tuple[int, str], ...]
    # None if tokens were removed: then nothing is measured again.
    scored: service.AttributionInputs | None

    @classmethod
    def read(cls, context: ServiceContext, session: Session, key: events.StepKey) -> _Stored:
        found = tuple(shards.shards_of_step(session, key))
        is_whole = all(shard.tokens_purged_at_us is None for shard in found)
        scored = service.attribution_inputs(context, session, key) if is_whole else None
        return cls(found, tuple((shard.shard, shard.file) for shard in found), scored)

    def gone_tokens(self, context: ServiceContext) -> str | None:
        """Return why the step cannot be measured again; None if its token files exist."""
        if self.scored is None:
            return f"{shards.PURGED}; its measures stay"
        gone = [shard.file for shard in self.shards if not context.store.file(shard.file).exists()]
        return f"{len(gone)} of its {len(self.shards)} token files are missing, such as {gone[0]}" if gone else None

    def gone_scores(self) -> str | None:
        """Return why its scores cannot be compared again; None if their files exist."""
        gone = [score.file.name for score in self.scored.scores if not score.file.exists()] if self.scored else []
        missing = f"{len(gone)} files of its replayed scores are missing"
        return f"{missing}, such as {gone[0]}; their measures are unchanged" if gone else None


def remeasure_step(context: ServiceContext, key: events.StepKey) -> str | None:
    """Measure a step again and replace its stored measures; return why a part was left unchanged, None if none was."""
    with RunIsolated(context.database, context.events, key.run_id, f"measure its step {key.step} again"):
        try:
            for _ in range(_TRIES):
                with context.database.read() as session:
                    stored = _Stored.read(context, session, key)
                gone = stored.gone_tokens(context)
                if gone is not None or _replaced(context, key, stored):
                    return gone or stored.gone_scores() or _still_old(context, key)
            return "rollouts or scores of it kept arriving: run it again"
        except OSError as error:
            return f"a file of it cannot be read: {error}"
        except MemoryError:
            return "it needs more memory than FORESHOCK_DECODE_MEMORY_BYTES allows"
        except (ForeshockError, problem.ProblemError) as error:
            return str(error)
        except OperationalError as error:
            return f"the database refused the transaction: {error.orig}; run it again"
    return "its stored state cannot be read; the page of its run and the log say why"


def check_step(context: ServiceContext, key: events.StepKey) -> str | None:
    """Return what `remeasure_step` would say of the step's files, without measuring."""
    with context.database.read() as session:
        stored = _Stored.read(context, session, key)
    return stored.gone_tokens(context) or stored.gone_scores()


def _replaced(context: ServiceContext, key: events.StepKey, stored: _Stored) -> bool:
    """Measure the step and replace its measures in one transaction; False if it has changed meanwhile."""
    measured = [shards.measure_again(context, shard) for shard in stored.shards]
    folded = shard_decoding.FoldedStep.of(key, measured)
    scored, attribution = stored.scored, None
    if scored is not None and scored.scores and stored.gone_scores() is None:
        attribution = context.decoders.run(
            compute.attribute_step, scored.rollouts, scored.scores, scored.attempt_fingerprint
        )

    def replace(session: Session) -> bool:
        if lock_run_for_background(session, key.run_id) is None:
            return True
        if _Stored.read(context, session, key) != stored:
            return False
        numbers = [shard.shard for shard in stored.shards]
        shards.replace_shards(session, key, zip(numbers, measured, strict=True))
        if steps.is_closed(session, key):
            shards.store_fold(session, key, folded, again=True)
        if scored is not None and attribution is not None:
            service.store_attribution(context, session, key, scored.version, attribution)
        return True

    return context.database.write(replace)


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


def _steps_to_measure(session: Session, run_id: str | None, request: Request) -> list[events.StepKey]:
    """Return the requested steps of a run (None: of every run), in order.

    Steps whose statistics are of another version, or without a count of this release: counts are never NULL. A new
    measure without its own count is not found: `everything` computes it for older steps.
    """
    key = (tables.Step.run_id, tables.Step.attempt, tables.Step.step)
    query = select(*key).join(tables.Run, tables.Run.id == tables.Step.run_id).where(tables.Run.deleted_at_us.is_(None))
    for column, wanted in zip(key, (run_id, request.attempt, request.step), strict=True):
        if wanted is not None:
            query = query.where(column == wanted)
    if not request.everything:
        columns = tables.measurements.c
        counts = [measure.column for measure in COMPARISON_MEASURES if measure.column_type == "integer"]
        lacks_count = or_(*(columns[name].is_(None) for name in counts))
        old = [exists().where(engine.of_step(columns, tables.Step), columns.tokens.is_not(None), lacks_count)]
        for table in (tables.ShardStatistics, tables.MeasurementStatistics):
            other = table.statistics_version != STATISTICS_VERSION
            old.append(exists().where(engine.of_step(table, tables.Step), other))
        query = query.where(or_(*old))
    return [events.StepKey(*row) for row in session.execute(query.order_by(tables.Run.created_at_us, *key))]


def remeasure(request: Request, decoders: DecoderPool | None = None) -> int:
    """Measure the requested steps again; return 0 if nothing was left unchanged, else 1. Raises ConfigurationError.

    `decoders` is a pool to share; None: it makes one.
    """
    with maintenance_context(settings.load_settings(), decoders) as context:
        with context.database.read() as session:
            run_id = run_called(session, request.run).id if request.run is not None else None
            keys = _steps_to_measure(session, run_id, request)
            everything = replace(request, everything=True)
            if not keys and request.step is not None and not _steps_to_measure(session, run_id, everything):
                raise ConfigurationError(f"there is no step {request.step}")
        if not keys:
            print(f"nothing to do: all statistics are of version {STATISTICS_VERSION}, which this release reads")
            return 0
        print(f"{len(keys)} steps of {len({key.run_id for key in keys})} runs", flush=True)
        if request.dry_run:
            left = list(zip(keys, map(partial(check_step, context), keys), strict=True))
        else:
            left = _measure_all(context, keys)
        left = [(key, why) for key, why in left if why is not None]
        for key, why in left:
            print(f"left: run {key.run_id}, attempt {key.attempt}, step {key.step}: {why}", file=sys.stderr)
        end = "would be measured again; nothing was changed" if request.dry_run else "were measured again"
        print(f"{len(keys) - len(left)} of {len(keys)} steps {end}")
    return 1 if left else 0


def _measure_all(context: ServiceContext, keys: Sequence[events.StepKey]) -> list[tuple[events.StepKey, str | None]]:
    """Measure the steps again, as many at once as there are decoders; return why parts of each were left unchanged."""
    progress = Progress("measuring again", len(keys))
    if not context.decoders.is_warm:
        context.decoders.warm_up()
    done: list[tuple[events.StepKey, str | None]] = []
    with ThreadPoolExecutor(context.settings.decode_processes) as threads:
        try:
            for key, left in zip(keys, threads.map(partial(remeasure_step, context), keys), strict=True):
                done.append((key, left))
                progress.show(len(done))
        except BaseException:
            # Interrupted: finish the running steps, start no other.
            threads.shutdown(cancel_futures=True)
            print(f"\nended early, after {len(done)} of {len(keys)} steps: run it again to continue", file=sys.stderr)
            raise
    return done
