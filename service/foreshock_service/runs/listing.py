"""Values of whole runs for the list of runs: the newest values, and short curves of reward and k3."""

import statistics
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import TTLCache
from sqlalchemy import Select, and_, case, func, select, tuple_
from sqlalchemy.orm import Session

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis import mismatch_rules, quantities
from foreshock_service.platform.database.tables import OLDEST_ATTEMPT_FIRST, Attempt, Run, Scalar, measurements
from foreshock_service.runs.attempts import is_superseded
from foreshock_service.runs.measurements import POOLED_STEPS, newest_steps

SHORT = 60
"""Points of a short curve. Each is the mean of an equal part of the run's steps."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A measure of the list, and the scalar that replaces it in runs without rollouts."""

    comparison: str
    column: str
    key: str


QUANTITIES: Mapping[str, Quantity] = {
    "reward": Quantity(STEP_ROW, "reward_mean", quantities.REWARD_KEY),
    "k3": Quantity(TRAINER_ROLLOUT, "k3_kl", mismatch_rules.K3),
}


@dataclass(frozen=True, slots=True)
class ShortCurve:
    """`points`: (place from 0 to SHORT − 1, mean), in order. `newest`: the value over the newest measured steps."""

    points: Sequence[tuple[int, float]]
    newest: float


# A cache: reading 50 runs of 2,000 steps takes 1.4 s of CPU time, and a list refreshes itself every 10 s.
_kept: TTLCache[tuple[str, int, int, int], dict[str, ShortCurve]] = TTLCache(4096, ttl=600)
_kept_lock = threading.Lock()


def newest_values(session: Session, run_ids: Collection[str]) -> dict[str, dict[str, float]]:
    """Return by quantity and run its value over the newest measured steps: k3 per token, the median reward."""
    rewards = newest_steps(session, run_ids, STEP_ROW, ("reward_mean",), POOLED_STEPS)
    k3 = newest_steps(session, run_ids, TRAINER_ROLLOUT, ("k3_kl", "tokens"), POOLED_STEPS)
    found: dict[str, dict[str, float]] = {"reward": {}, "k3": {}}
    for run_id, steps in rewards.items():
        known = [value for step in steps if (value := step.values["reward_mean"]) is not None]
        if known:
            found["reward"][run_id] = statistics.median(known)
    for run_id, steps in k3.items():
        pairs = [(value, step.values["tokens"] or 0) for step in steps if (value := step.values["k3_kl"]) is not None]
        tokens = sum(weight for _, weight in pairs)
        if tokens:
            found["k3"][run_id] = sum(value * weight for value, weight in pairs) / tokens
    return found


def newest_or_reported(session: Session, name: str, last_steps: Mapping[str, int]) -> dict[str, float]:
    """Return by run the newest value of a quantity, else what its trainer reports at the run's newest step."""
    found = newest_values(session, list(last_steps))[name]
    missing = {run_id: last for run_id, last in last_steps.items() if run_id not in found}
    if not missing:
        return found
    names_by_run = _names_by_run(session, QUANTITIES[name], missing)
    query = select(Scalar.run_id, Scalar.name, Scalar.value).where(
        tuple_(Scalar.run_id, Scalar.step).in_(list(missing.items())),
        Scalar.name.in_({each for names in names_by_run.values() for each in names}),
        Scalar.value.is_not(None),
    )
    of_scalar = and_(Attempt.run_id == Scalar.run_id, Attempt.attempt == Scalar.attempt)
    reported: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for run_id, each, value in session.execute(query.join(Attempt, of_scalar).order_by(*OLDEST_ATTEMPT_FIRST)):
        reported[run_id][each] = value
    for run_id, values in reported.items():
        if preferred := [values[each] for each in names_by_run[run_id] if each in values]:
            found[run_id] = preferred[0]
    return found


def _names_by_run(session: Session, quantity: Quantity, run_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return by run the scalars' names of a quantity, the preferred one first: those that the run declares, if any."""
    query = select(Run.id, Run.scalar_names).where(Run.id.in_(run_ids))
    return {run_id: quantities.names_of([quantity.key], declared or {}) for run_id, declared in session.execute(query)}


def short_curves(session: Session, versions: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, ShortCurve]]:
    """Return by run and quantity its short curve over the active steps; a quantity that is not logged is absent.

    `versions` has for each run its newest step and its number of received tokens, which grows with every upload. A run
    without the measure has the curve of the scalar that its trainer reports.
    """
    query = select(Attempt.run_id, func.max(Attempt.attempt)).where(Attempt.run_id.in_(versions))
    attempts = {row[0]: row[1] for row in session.execute(query.group_by(Attempt.run_id))}
    keys = {run: (run, attempts.get(run, 0), *version) for run, version in versions.items()}
    with _kept_lock:
        known = {run: curves for run, key in keys.items() if (curves := _kept.get(key)) is not None}
    read = _read(session, {run: step for run, (step, _) in versions.items() if run not in known})
    with _kept_lock:
        _kept.update({keys[run]: curves for run, curves in read.items()})
    return known | read


def _read(session: Session, last_steps: Mapping[str, int]) -> dict[str, dict[str, ShortCurve]]:
    found: dict[str, dict[str, ShortCurve]] = {run_id: {} for run_id in last_steps}
    if not last_steps:
        return found
    newest = newest_values(session, list(last_steps))
    for name, quantity in QUANTITIES.items():
        measured = _measured(session, quantity, last_steps)
        missing = {run_id: last for run_id, last in last_steps.items() if run_id not in measured}
        for run_id, points in (measured | (_reported(session, quantity, missing) if missing else {})).items():
            found[run_id][name] = ShortCurve(points, newest[name].get(run_id, points[-1][1]))
    return found


def _measured(
    session: Session, quantity: Quantity, last_steps: Mapping[str, int]
) -> dict[str, list[tuple[int, float]]]:
    table = measurements.c
    value = table[quantity.column]
    query = _short(table.run_id, table.attempt, table.step, value, last_steps).where(
        table.comparison == quantity.comparison
    )
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for run_id, place, mean in session.execute(query):
        found[run_id].append((place, mean))
    return dict(found)


def _reported(
    session: Session, quantity: Quantity, last_steps: Mapping[str, int]
) -> dict[str, list[tuple[int, float]]]:
    names_by_run = _names_by_run(session, quantity, last_steps)
    every = {each for names in names_by_run.values() for each in names}
    query = _short(Scalar.run_id, Scalar.attempt, Scalar.step, Scalar.value, last_steps).where(Scalar.name.in_(every))
    found: defaultdict[str, defaultdict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for run_id, place, mean, name in session.execute(query.add_columns(Scalar.name).group_by(Scalar.name)):
        found[run_id][name][place] = mean
    curves = {run_id: quantities.preferred_values(of_names, names_by_run[run_id]) for run_id, of_names in found.items()}
    return {run_id: list(curve.items()) for run_id, curve in curves.items() if curve}


def _short(run_id: Any, attempt: Any, step: Any, value: Any, last_steps: Mapping[str, int]) -> Select[Any]:
    """Return (run, place, mean) of the active steps, given the columns of a table."""
    place = step * SHORT // case({run: last + 1 for run, last in last_steps.items()}, value=run_id, else_=1)
    return (
        select(run_id, place, func.avg(value))
        .where(run_id.in_(last_steps), value.is_not(None), ~is_superseded(run_id, attempt, step))
        .group_by(run_id, place)
        .order_by(run_id, place)
    )
