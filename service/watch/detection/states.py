"""The states of the detectors: those of milestones are stored, passing ones stay in the memory of the process that made
them, and their rows name them by a random identity.

A state is a function of the history. A process that does not have a passing one derives it from the newest state before
that it has, or that is stored: some MILESTONE_STEPS steps at most.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence

from sqlalchemy.orm import Session

from foreshock.early_warning.detectors import WarningState, advance
from foreshock_service.runs.attempts.active_attempts import AttemptStart
from foreshock_service.watch.detection import repository
from foreshock_service.watch.detection.configurations import WatchedRun
from foreshock_service.watch.detection.history import closed_steps_after
from foreshock_service.watch.detection.repository import Snapshot

MILESTONE_STEPS = 25
"""A state is kept for good in every block of so many steps: a late shard replays at most one block before it."""

RECENT_STATES = 4
"""The newest states are kept as well: scalars come just after their step, and scores some steps later."""

_STATES_IN_MEMORY = 1024
"""Of some 9 kB each: RECENT_STATES of each of the 256 runs that closed steps last."""


class _Memory:
    """States by identity; those that were not used for longest are forgotten. Thread-safe."""

    def __init__(self) -> None:
        self._states: OrderedDict[int, WarningState] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, identity: int, state: WarningState) -> None:
        """Remember a state."""
        with self._lock:
            self._states[identity] = state
            self._states.move_to_end(identity)
            if len(self._states) > _STATES_IN_MEMORY:
                self._states.popitem(last=False)

    def get(self, identity: int) -> WarningState | None:
        """Return the state of an identity, None if it is not known here."""
        with self._lock:
            if identity in self._states:
                self._states.move_to_end(identity)
            return self._states.get(identity)

    def clear(self) -> None:
        """Forget all states, as a process that starts has none."""
        with self._lock:
            self._states.clear()


MEMORY = _Memory()


def remember(state: WarningState) -> int:
    """Keep a state in memory and return its new identity."""
    identity = secrets.randbits(62)
    MEMORY.put(identity, state)
    return identity


def state_of(
    session: Session, snapshot: Snapshot, run_id: str, attempts: Sequence[AttemptStart], watched: WatchedRun
) -> WarningState:
    """Return the state of a snapshot of an active step."""
    known = _known(snapshot)
    if known is not None:
        return known
    state = newest_before(session, run_id, attempts, snapshot.step, snapshot.configuration_digest)
    after = -1 if state.step is None else state.step
    for closed, _ in closed_steps_after(session, run_id, attempts, after, watched):
        if closed.step > snapshot.step:
            break
        state, _ = advance(state, closed, watched.configuration)
    MEMORY.put(snapshot.identity, state)
    return state


def newest_before(
    session: Session, run_id: str, attempts: Sequence[AttemptStart], before: int, configuration_digest: str
) -> WarningState:
    """Return the newest state, in memory or stored, of the active steps before `before`; the initial one if none is."""
    # All but RECENT_STATES are milestones.
    found = repository.snapshots_before(session, run_id, attempts, before, configuration_digest, RECENT_STATES + 1)
    return next((state for snapshot in found if (state := _known(snapshot)) is not None), WarningState())


def _known(snapshot: Snapshot) -> WarningState | None:
    state = MEMORY.get(snapshot.identity)
    if state is None and snapshot.state is not None:
        state = WarningState.from_bytes(snapshot.state)
        MEMORY.put(snapshot.identity, state)
    return state
