"""Events of a run that other parts handle, and the key of a step. Events are published with the run locked."""

from dataclasses import dataclass
from typing import NamedTuple

from foreshock.learning_rate.levers import Correction
from foreshock.learning_rate.modes import AdviceMode, Lever


class StepKey(NamedTuple):
    """Key of a step, in the order of the tables' primary keys. Two attempts may have the same step; one is active."""

    run_id: str
    attempt: int
    step: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step that changed; a closed one unless the event says otherwise."""

    run_id: str
    attempt: int
    step: int

    @property
    def key(self) -> StepKey:
        """Return the key of the step."""
        return StepKey(self.run_id, self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class StepClosed(StepEvent):
    """Step that has closed, or into which a late shard was folded."""


@dataclass(frozen=True, slots=True)
class ScalarsLogged(StepEvent):
    """Step that received scalars of these names: one that is closed, or one of a run without rollouts."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """Resume of a run at `resume_step`; the steps of older attempts from there on are superseded.

    If not `is_newest`, it was registered late, and its steps end where the attempt that followed it begins.
    """

    run_id: str
    attempt: int
    resume_step: int
    is_newest: bool = True


@dataclass(frozen=True, slots=True)
class AdviceModeChanged:
    """Change of a lever's mode between `shadow` and `apply` (None: it stays), or of the correction that is asked for.

    `by_trainer`: with the start of an attempt; a mode that was chosen before stays.
    """

    run_id: str
    mode: AdviceMode | None
    lever: Lever = "rate"
    asked: Correction | None = None
    by_trainer: bool = False


@dataclass(frozen=True, slots=True)
class ItemsLost(StepEvent):
    """Items that the clients of an attempt will not deliver, `lost` in total; `step` is the run's newest step."""

    lost: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class RunRemoved:
    """Deletion of a run: its tombstone is set, its rows are deleted in the background."""

    run_id: str


@dataclass(frozen=True, slots=True)
class TrainerHeard:
    """A sign of life of a trainer of the run."""

    run_id: str


@dataclass(frozen=True, slots=True)
class RunFailed:
    """A run that the service could not handle, such as one with unreadable stored state; `work` says what it tried."""

    run_id: str
    error: Exception
    work: str = "judge this run"


@dataclass(frozen=True, slots=True)
class RunBecameStale:
    """A running run whose clients gave no sign of life for `seconds`; `last_step` has its newest rollouts."""

    run_id: str
    last_step: int | None
    seconds: float
