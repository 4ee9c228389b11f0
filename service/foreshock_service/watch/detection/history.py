"""The history that the detectors read: a run's closed steps, in order, with the watched measures and scalars.

As long as a run has no rollouts, its steps are those of its scalars. A step with a watched scalar closes when a later
step of its attempt has one, when a newer attempt begins, or after a grace time. Which steps are
closed, and their values, therefore do not depend on the order of arrival.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock.clock import now_us
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.quantities import ENTROPY_KEY, REWARD_KEY, SCALARS, names_of, quantities_of
from foreshock.diagnosis.rule_files import RuleChanges
from foreshock.digests import digest_of_json
from foreshock.measures.registry import MEASURES
from foreshock.model_kind import ModelKind
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.engine import upsert
from foreshock_service.platform.database.tables import Run, ScalarTail, Step
from foreshock_service.runs import attempts, changes, due, lint, measurements, runs, steps
from foreshock_service.runs.events import ScalarsLogged
from foreshock_service.runs.failing_runs import RunIsolated
from foreshock_service.runs.scalars import newest_step_with_scalars, scalars_of_active_steps, steps_with_scalars
from foreshock_service.watch.rules import rules_in_force

_COLUMNS = frozenset(measure.column for measure in MEASURES)

_LOGGED = frozenset({REWARD_KEY, ENTROPY_KEY})
"""Quantities of the rollouts' optional columns: at a step whose rollouts lack them, they are read from scalars."""

_KEPT = 256
"""Most cached configurations: one for each kind of model, and one for each run with its own names."""


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The configuration of a run's detectors; a stored state is used only under the digest that it was made with.

    `keys` are the quantities that are read, as `comparison:measure`; `names` are the scalars that may hold them.
    """

    configuration: WarningConfiguration
    digest: str
    keys: tuple[str, ...]
    scalars_only: bool
    declared: Mapping[str, str]
    names: tuple[str, ...]


def watched_as(session: Session, run: Run) -> WatchedRun:
    """Return how the run is watched."""
    declared = tuple(sorted((run.scalar_names or {}).items()))
    return _watched(run.model_kind, rules_in_force(session), run.last_step is None, declared)


@lru_cache(maxsize=_KEPT)
def _watched(
    model_kind: ModelKind | None,
    rules: RuleChanges,
    scalars_only: bool,
    declared_names: tuple[tuple[str, str], ...],
) -> WatchedRun:
    configuration = WarningConfiguration.for_model(model_kind, rules)
    declared = dict(declared_names)
    read = [key for key in configuration.keys if _is_read_from_scalars(key, scalars_only)]
    digest = digest_of_json({"configuration": configuration.digest(), "read": read, "declared": declared})
    return WatchedRun(configuration, digest, configuration.keys, scalars_only, declared, names_of(read, declared))


def _is_read_from_scalars(key: str, scalars_only: bool) -> bool:
    """Return whether a quantity is read from scalars: without rollouts the values of measures are, too."""
    return scalars_only or key in _LOGGED or key.startswith(f"{SCALARS}:")


def closed_steps_after(
    session: Session, run_id: str, after: int, watched: WatchedRun, limit: int
) -> list[tuple[ClosedStep, int]]:
    """Return the first `limit` active closed steps after `after`, each with its watched values and its attempt. A value
    that a step does not have is absent. Without rollouts, the steps and values are those of the scalars.
    """
    found = _steps_after(session, run_id, after, watched, limit)
    if not found:
        return []
    first = found[0][0]
    last = found[-1][0]
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    keys = frozenset(watched.keys)
    reported = {key for key in keys if _is_read_from_scalars(key, watched.scalars_only)}
    for step, scalars in scalars_of_active_steps(session, run_id, watched.names, first, last).items():
        quantities = quantities_of(scalars, watched.declared, keys)
        values[step] = {name: value for name, value in quantities.items() if name in reported}
    pairs = [tuple(key.split(":", 1)) for key in watched.keys if key.partition(":")[2] in _COLUMNS]
    if pairs and not watched.scalars_only:
        names, columns = (sorted(set(each)) for each in zip(*pairs, strict=True))
        measures_of = measurements.measures_of_active_steps(session, run_id, names, columns, first, last)
        for step, measures in measures_of.items():
            values[step] |= {":".join(pair): measures[pair] for pair in pairs if pair in measures}
    # A change takes effect at the first closed step at or after it; changes up to `after` have taken effect already.
    numbers = [step for step, _ in found]
    changed = {bisect_left(numbers, change) for change in changes.rebaselined_steps(session, run_id) if change > after}
    faulty = set() if watched.scalars_only else lint.faulty_steps(session, run_id, first, last)
    return [
        (ClosedStep(step, values[step], place in changed, step in faulty), attempt)
        for place, (step, attempt) in enumerate(found)
    ]


def _steps_after(session: Session, run_id: str, after: int, watched: WatchedRun, limit: int) -> list[tuple[int, int]]:
    """Return (step, attempt) of the first `limit` active closed steps after `after`, in order."""
    if not watched.scalars_only:
        closed_steps = (
            Step.run_id == run_id,
            Step.closed_at_us.is_not(None),
            attempts.active_rows(session, run_id, Step, after + 1),
        )
        query = select(Step.step, Step.attempt).where(*closed_steps).order_by(Step.step).limit(limit)
        return [(step, attempt) for step, attempt in session.execute(query)]
    found = steps_with_scalars(session, run_id, watched.names, after, limit)
    if not found or found[-1][1] != (newest := attempts.attempts_of_run(session, run_id)[-1].attempt):
        return found
    last = found[-1][0]
    # Fewer steps than asked for are all that there are.
    if len(found) == limit and last != newest_step_with_scalars(session, run_id, newest, watched.names):
        return found
    tail = session.get(ScalarTail, run_id)
    closed = tail is not None and tail.closed and tail.attempt == newest and tail.step >= last
    return found if closed else found[:-1]


_RUNS_PER_SWEEP = 100


def observe_scalars(session: Session, logged: ScalarsLogged) -> None:
    """Mark the run from the first step that these scalars close or change. The run is locked.

    Scalars of superseded steps and scalars that no detector reads close and change none.
    """
    watched = watched_as(session, session.get_one(Run, logged.run_id))
    if logged.names.isdisjoint(watched.names):
        due.mark(session, logged.run_id)
        return
    if not watched.scalars_only:
        steps.mark_step(session, logged.key)
        return
    if not attempts.is_active(session, logged):
        return
    started = [each.attempt for each in attempts.attempts_of_run(session, logged.run_id)]
    tail = session.get(ScalarTail, logged.run_id)
    here = (started.index(logged.attempt), logged.step)
    before = None if tail is None else (started.index(tail.attempt), tail.step)
    was_closed = tail is not None and tail.closed
    if before is None or here >= before:
        key = {"run_id": logged.run_id, "attempt": logged.attempt, "step": logged.step}
        row = {**key, "received_at_us": now_us(), "closed": was_closed and here == before}
        upsert(session, ScalarTail, [row], ("run_id",))
    is_still_open = here == before and logged.attempt == started[-1] and not was_closed
    # Not if it is the first step of an attempt, or the step that is still open: no step has closed.
    if before is not None and here[0] <= before[0] and not is_still_open:
        due.mark(session, logged.run_id, min(here, before)[1])


def close_scalar_tails(context: ServiceContext) -> int:
    """Close the newest steps that got no scalars for the grace time, or whose run has ended; return how many."""
    before = now_us() - int(context.settings.step_grace_seconds * 1e6)
    waiting = (
        select(ScalarTail.run_id)
        .join(Run, Run.id == ScalarTail.run_id)
        .where(
            ScalarTail.closed.is_(False),
            Run.deleted_at_us.is_(None),
            or_(ScalarTail.received_at_us < before, Run.state.in_(runs.ENDED)),
        )
    )
    with context.database.read() as session:
        run_ids = session.scalars(waiting.order_by(ScalarTail.run_id).limit(_RUNS_PER_SWEEP)).all()
    database, events = context.database, context.events
    closed = 0
    for run_id in run_ids:
        with RunIsolated(database, events, run_id):
            closed += database.write(partial(_close, run_id))
    return closed


def _close(run_id: str, session: Session) -> bool:
    run, tail = runs.lock_run_for_background(session, run_id), session.get(ScalarTail, run_id)
    if run is None or tail is None or tail.closed:
        return False
    tail.closed = True
    session.flush()
    if run.last_step is None:
        due.mark(session, run_id, tail.step)
    return True
