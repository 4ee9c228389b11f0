"""Replays over a long history, such as after late data of the first steps: computed outside the writer.

The transaction that changed a step notes that a replay is due. Before its caller goes on, the history is replayed from
a snapshot of the database, and one short transaction stores what differs: states, alerts, decisions. It checks that no
further late data arrived; steps that closed meanwhile are replayed in it. After a crash the sweeper makes the replay.

The detectors forget: usually the state is the stored one again some 200 steps after a late step. At the first such
milestone the replay ends, and everything after it stands. A change within the baselines is never forgotten: then the
whole history is replayed, by arrays (`foreshock/early_warning/stretches`), and few of its states are kept.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.database.hooks import in_caller_after_commit
from foreshock_service.platform.database.packing import Packed
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.events import EventBus
from foreshock_service.runs.attempts.service import attempts_of_run
from foreshock_service.runs.runs.service import lock_run_for_background
from foreshock_service.watch.detection import repository, states
from foreshock_service.watch.detection.configurations import watched_as, watched_run
from foreshock_service.watch.detection.events import DetectorsReplayed, ReplayDue
from foreshock_service.watch.detection.history import closed_steps_after, history_after
from foreshock_service.watch.detection.replay_detectors import Replay
from foreshock_service.watch.detection.service import newest_state, observed_steps
from foreshock_service.watch.detection.states import RECENT_STATES

_TRIES = 5
"""Replays of a run, while late data keeps arriving, before it is left to the sweeper."""

_STEPS_READ_FIRST = 400
"""Usually enough to meet the stored states again: the detectors look back 200 steps."""

_STEPS_READ_AT_ONCE = 5_000

_STEPS_WITH_DENSE_STATES = 250
"""The newest steps, of which a replay keeps a state in every block of MILESTONE_STEPS: most late data is of them."""

_RUNS_PER_SWEEP = 20
_logger = logging.getLogger(__name__)
# A process makes a replay of a run once at a time. Unrelated runs may share a lock.
_LOCKS = tuple(threading.Lock() for _ in range(16))


@dataclass(slots=True)
class _Computed:
    """A replay of the history as it was read, from step `first` to `last`: `due` identifies it.

    If `is_as_stored_after`, the stored states and events of later steps stand; else there are no later steps.
    """

    due: repository.Due
    first: int
    last: int
    replay: Replay
    changed: list[dict[str, Any]]
    obsolete: set[tuple[int, int]]
    is_as_stored_after: bool


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
    watched = watched_run(session, run_id)
    configuration, digest = watched.configuration, watched.digest
    replay = Replay(states.newest_before(session, run_id, attempts, due.from_step, digest))
    first = replay.step + 1
    stored: dict[tuple[int, int], repository.Snapshot] = {}
    met, at_once, sparse_until = None, _STEPS_READ_FIRST, -1
    while met is None and (history := history_after(session, run_id, attempts, replay.step, watched, at_once)):
        known = len(replay.milestones)
        replay.go_over(history, configuration, sparse_until)
        for attempt, step, state in replay.milestones[known:]:
            found = repository.snapshot_at(session, run_id, attempt, step)
            if found is not None:
                stored[attempt, step] = found
                if step >= due.through_step and (found.configuration_digest, found.state) == (digest, state.to_bytes()):
                    met = step
                    break
        at_once, sparse_until = _STEPS_READ_AT_ONCE, _newest_step(session, run_id) - _STEPS_WITH_DENSE_STATES
    if met is not None:
        replay.end_at(met)
    last = repository.ALL_STEPS if met is None else met
    known_before = repository.snapshots_between(session, run_id, first - 1, last)
    rows = replay.snapshots(run_id, digest)
    changed = [row for row in rows if not _is_stored(row, stored)]
    for row in changed:
        if row["state"] is not None:
            row["state"] = Packed.of(row["state"])
    obsolete = known_before - {(row["attempt"], row["step"]) for row in rows}
    return _Computed(due, first, replay.step, replay, changed, obsolete, met is not None)


def _newest_step(session: Session, run_id: str) -> int:
    """Return the newest step that the detectors have seen; −1 before any."""
    return observed_steps(session, [run_id]).get(run_id, -1)


def _is_stored(row: dict[str, Any], stored: dict[tuple[int, int], repository.Snapshot]) -> bool:
    found = stored.get((row["attempt"], row["step"]))
    return found is not None and all(getattr(found, name) == row[name] for name in found._fields if name != "identity")


def _store(events: EventBus, run_id: str, computed: _Computed, session: Session) -> bool:
    """Store a replay and return True; False if the history changed before its last step since it was read."""
    run = lock_run_for_background(session, run_id)
    if run is None:
        repository.drop_due_replay(session, run_id)
        return True
    if repository.due_replay(session, run_id) != computed.due:
        return False
    attempts = attempts_of_run(session, run_id)
    watched = watched_as(session, run)
    configuration, digest = watched.configuration, watched.digest
    if computed.is_as_stored_after:
        repository.put_snapshots(session, run_id, computed.changed, computed.obsolete)
        repository.drop_due_replay(session, run_id)
        state = newest_state(session, run_id)
        found = computed.replay.events
        events.publish(
            session,
            DetectorsReplayed(run_id, attempts, computed.first, found, state, configuration, computed.last),
        )
        return True
    # Steps that closed meanwhile followed states of the history before the change.
    repository.drop_snapshots(session, run_id, computed.last + 1)
    repository.put_snapshots(session, run_id, computed.changed, computed.obsolete)
    # A copy: the transaction may run again.
    replay = Replay(computed.replay.state, list(computed.replay.events))
    replay.go_on(closed_steps_after(session, run_id, attempts, computed.last, watched), configuration)
    repository.store_snapshots(session, run_id, replay.snapshots(run_id, digest), keep=RECENT_STATES)
    repository.drop_due_replay(session, run_id)
    events.publish(
        session, DetectorsReplayed(run_id, attempts, computed.first, replay.events, replay.state, configuration)
    )
    return True
