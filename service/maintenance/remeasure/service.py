"""Measure a stored step again: its shards from their token files, its replayed scores from theirs.

Everything is computed before the transaction that replaces it, one for a step; that transaction checks that nothing
has arrived since. So it may run beside the service, twice at once, and may be interrupted: each step is as it was or as
it is measured now. SQLite serialises its transactions with the service's own, which wait for milliseconds.

The same token files give the same statistics. What alerts and advice made of the values when they were new stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from foreshock.errors import ForeshockError
from foreshock_service.maintenance.remeasure import repository
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.problem import ProblemError
from foreshock_service.replay.attribution.compute import AttributionResult, attribute_step
from foreshock_service.replay.attribution.service import AttributionInputs, attribution_inputs, store_attribution
from foreshock_service.replay.results.exact import remeasure_exact
from foreshock_service.runs.lint.judging import judge_step
from foreshock_service.runs.measurements.folding import fold_step
from foreshock_service.runs.rollouts.remeasuring import TokenFile, measure_file
from foreshock_service.runs.rollouts.service import replace_shards, shards_of_step
from foreshock_service.runs.rollouts.shards import FoldedStep, MeasuredShard
from foreshock_service.runs.runs.service import lock_run_for_background
from foreshock_service.runs.step_key import StepKey
from foreshock_service.runs.steps.closing import store_fold
from foreshock_service.runs.steps.service import is_closed

_TRIES = 5


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of a step; `left` is the reason why a part was left unchanged, None if no part was."""

    key: StepKey
    left: str | None = None


@dataclass(frozen=True, slots=True)
class _Stored:
    """A step as it is stored: the files of its shards in order, and its scores."""

    files: tuple[TokenFile, ...]
    # None if tokens were removed: then nothing is measured again.
    scored: AttributionInputs | None

    @classmethod
    def read(cls, context: ServiceContext, session: Session, key: StepKey) -> _Stored:
        files = tuple(TokenFile.of(shard) for shard in shards_of_step(session, key))
        whole = all(file.tokens_removed is None for file in files)
        return cls(files, attribution_inputs(context, session, key) if whole else None)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A step as it is measured now: its shards, their folds, and the attribution of its scores (None: not replaced)."""

    stored: _Stored
    shards: tuple[MeasuredShard, ...]
    folded: FoldedStep
    attribution: AttributionResult | None


def remeasure_step(context: ServiceContext, key: StepKey) -> StepReport:
    """Measure a step again and replace its stored measures; what cannot be measured is left unchanged and reported."""
    try:
        for _ in range(_TRIES):
            with context.database.read() as session:
                stored = _Stored.read(context, session, key)
            gone = _removed(stored.files) or gone_files(context, stored.files)
            if gone:
                return StepReport(key, gone)
            measured, gone = _measure(context, key, stored)
            if context.database.write(partial(_replace, context, key, measured)):
                return StepReport(key, gone or _still_old(context, key) or remeasure_exact(context, key))
        return StepReport(key, "rollouts or scores of it kept arriving: run it again")
    except OSError as error:
        return StepReport(key, f"a file of it cannot be read: {error}")
    except MemoryError:
        return StepReport(key, "it needs more memory than FORESHOCK_DECODE_MEMORY_BYTES allows")
    except (ForeshockError, ProblemError) as error:
        return StepReport(key, str(error))
    except OperationalError as error:
        return StepReport(key, f"the database refused the transaction: {error.orig}; run it again")


def check_step(context: ServiceContext, key: StepKey) -> StepReport:
    """Return the report of `remeasure_step` on the step's files, without measuring."""
    with context.database.read() as session:
        stored = _Stored.read(context, session, key)
    return StepReport(key, _removed(stored.files) or gone_files(context, stored.files) or _gone_scores(stored.scored))


def _removed(files: Sequence[TokenFile]) -> str | None:
    """Return why a step cannot be measured again although nothing is missing; None if it can."""
    removed = [why for file in files if (why := file.removed_in_words()) is not None]
    return f"{removed[0]}; its measures stay" if removed else None


def gone_files(context: ServiceContext, files: Sequence[TokenFile]) -> str | None:
    """Describe the missing token files; None if all exist."""
    gone = [file for file in files if not context.store.file(file.name).exists()]
    if not gone:
        return None
    return f"{len(gone)} of its {len(files)} token files are missing, such as {gone[0].name}"


def _measure(context: ServiceContext, key: StepKey, stored: _Stored) -> tuple[_Measured, str | None]:
    """Return the step as it is measured now, and a description of missing scores."""
    measured = tuple(measure_file(context, file) for file in stored.files)
    measurements = fold_step(part for shard in measured for part in shard.parts)
    folded = FoldedStep(measurements, judge_step(key.step, key.attempt, [shard.lint for shard in measured]))
    gone = _gone_scores(stored.scored)
    attribution = None
    scored = stored.scored
    if scored is not None and scored.scores and gone is None:
        attribution = context.decoders.run(attribute_step, scored.rollouts, scored.scores, scored.attempt_fingerprint)
    return _Measured(stored, measured, folded, attribution), gone


def _replace(context: ServiceContext, key: StepKey, measured: _Measured, session: Session) -> bool:
    """Replace everything in this transaction; False if the step has changed since it was measured."""
    if lock_run_for_background(session, key.run_id) is None:
        return True
    if _Stored.read(context, session, key) != measured.stored:
        return False
    numbers = [file.shard for file in measured.stored.files]
    replace_shards(session, key, list(zip(numbers, measured.shards, strict=True)))
    if is_closed(session, key):
        store_fold(session, key, measured.folded, again=True)
    if measured.attribution is not None and measured.stored.scored is not None:
        store_attribution(context, session, key, measured.stored.scored.version, measured.attribution)
    return True


def _gone_scores(scored: AttributionInputs | None) -> str | None:
    if scored is None:
        return None
    gone = [file.name for score in scored.scores for file in score.files if not file.exists()]
    if not gone:
        return None
    return f"{len(gone)} files of its replayed scores are missing, such as {gone[0]}; their measures are unchanged"


def _still_old(context: ServiceContext, key: StepKey) -> str | None:
    """Describe the comparisons that can no longer be computed from stored data."""
    with context.database.read() as session:
        old = repository.old_comparisons(session, key)
    return f"its scores no longer give {', '.join(old)}" if old else None
