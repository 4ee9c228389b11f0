"""Replays over a long history, such as after late data of the first steps: computed outside the writer.

The transaction that changed a step notes that a replay is due. Before its caller goes on, the history is replayed from
a snapshot of the database, and one short transaction stores what differs: states, alerts, decisions. It checks that no
further late data arrived; steps that closed meanwhile are replayed in it. After a crash the sweeper makes the replay.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from service.platform.context import ServiceContext
from service.platform.database.hooks import in_caller_after_commit
from service.platform.database.packing import Packed
from service.platform.database.session import Database
from service.platform.events import EventBus
from service.runs.attempts.service import attempts_of_run
from service.runs.runs.service import lock_run_for_background, model_kind_of
from service.watch.detection import repository
from service.watch.detection.events import DetectorsReplayed, ReplayDue
from service.watch.detection.history import closed_steps_after
from service.watch.detection.replay_detectors import RECENT_STATES, Replay, configuration_of

_TRIES = 5
"""Replays of a run, while late data keeps arriving, before it is left to the sweeper."""

_STEPS_READ_AT_ONCE = 2_000
_RUNS_PER_SWEEP = 20
_logger = logging.getLogger(__name__)
# A process makes a replay of a run once at a time. Unrelated runs may share a lock.
_LOCKS = tuple(threading.Lock() for _ in range(16))


@dataclass(slots=True)
class _Computed:
    """A replay of the history as it was read: `due` identifies it, `first` is its first step."""

    due: tuple[int, int]
    first: int
    last: int
    replay: Replay
    changed: list[dict[str, Any]]
    obsolete: set[tuple[int, int]]


def replay_after_commit(events: EventBus, session: Session, due: ReplayDue) -> None:
    """Make the replay before the caller of the transaction goes on."""
    in_caller_after_commit(session, due.run_id, partial(make_due_replay, events, due.run_id))


def make_due_replays(context: ServiceContext) -> int:
    """Make the replays that are due, such as after a crash; return how many runs had one. For the sweeper."""
    with context.database.read() as session:
        runs = repository.runs_with_due_replay(session, _RUNS_PER_SWEEP)
    return sum(make_due_replay(context.events, run_id, context.database) for run_id in runs)


def make_due_replay(events: EventBus, run_id: str, database: Database) -> bool:
    """Make the replay of a run if one is due; return False if late data kept arriving."""
    with _LOCKS[hash(run_id) % len(_LOCKS)]:
        for _ in range(_TRIES):
            with database.read() as session:
                computed = _compute(session, run_id)
            if computed is None or database.write(partial(_store, events, run_id, computed)):
                return True
    _logger.warning("the detectors of run %s are not replayed: late data kept arriving; the sweeper retries", run_id)
    return False


def _compute(session: Session, run_id: str) -> _Computed | None:
    due = repository.due_replay(session, run_id)
    if due is None:
        return None
    attempts = attempts_of_run(session, run_id)
    configuration, digest = configuration_of(model_kind_of(session, run_id))
    base = repository.newest_snapshot(session, run_id, attempts, due[0], digest)
    replay = Replay.after(base)
    first = replay.step + 1
    while steps := closed_steps_after(session, run_id, attempts, replay.step, configuration.keys, _STEPS_READ_AT_ONCE):
        replay.go_on(steps, configuration)
    stored = repository.snapshots_after(session, run_id, first - 1)
    rows = replay.snapshots(run_id, digest)
    changed = [row for row in rows if not _is_stored(row, stored)]
    for row in changed:
        row["state"] = Packed.of(row["state"])
    obsolete = stored.keys() - {(row["attempt"], row["step"]) for row in rows}
    return _Computed(due, first, replay.step, replay, changed, set(obsolete))


def _is_stored(row: dict[str, Any], stored: dict[tuple[int, int], repository.Snapshot]) -> bool:
    found = stored.get((row["attempt"], row["step"]))
    return found is not None and all(getattr(found, name) == row[name] for name in found._fields)


def _store(events: EventBus, run_id: str, computed: _Computed, session: Session) -> bool:
    """Store a replay and return True; False if the history changed before its last step since it was read."""
    run = lock_run_for_background(session, run_id)
    if run is None:
        repository.drop_due_replay(session, run_id)
        return True
    if repository.due_replay(session, run_id) != computed.due:
        return False
    attempts = attempts_of_run(session, run_id)
    configuration, digest = configuration_of(run.model_kind)
    # Steps that closed meanwhile followed states of the history before the change.
    repository.drop_snapshots(session, run_id, computed.last + 1)
    repository.put_snapshots(session, run_id, computed.changed, computed.obsolete)
    # A copy: the transaction may run again.
    replay = Replay(computed.replay.state, list(computed.replay.events))
    replay.go_on(closed_steps_after(session, run_id, attempts, computed.last, configuration.keys), configuration)
    repository.add_snapshots(session, replay.snapshots(run_id, digest))
    repository.drop_passing_snapshots(session, run_id, keep=RECENT_STATES)
    repository.drop_due_replay(session, run_id)
    events.publish(
        session, DetectorsReplayed(run_id, attempts, computed.first, replay.events, replay.state, configuration)
    )
    return True
