"""Events of replays of the detectors. Published with the run locked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.early_warning.detectors import WarningConfiguration, WarningState
from foreshock.early_warning.events import Event
from foreshock_service.runs.attempts.active_attempts import AttemptStart


@dataclass(frozen=True, slots=True)
class ReplayDue:
    """A step changed that more steps follow than are replayed in a transaction; the replay is noted as due."""

    run_id: str


@dataclass(frozen=True, slots=True)
class DetectorsReplayed:
    """The events of the active closed steps from `from_step` to `until_step`, each with its attempt; None: of all steps
    from `from_step` on. Beyond `until_step` nothing has changed. `state` is the state after the newest step.
    """

    run_id: str
    attempts: Sequence[AttemptStart]
    from_step: int
    events: Sequence[tuple[Event, int]]
    state: WarningState
    configuration: WarningConfiguration
    until_step: int | None = None
