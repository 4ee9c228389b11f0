"""What happens to a run that other parts react to. Each is published with the run locked."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock.model_kind import ModelKind
from service.runs.step_key import StepKey


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A closed step that changed."""

    run_id: str
    attempt: int
    step: int

    @property
    def key(self) -> StepKey:
        """Return the key of the step."""
        return StepKey(self.run_id, self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class StepClosed(StepEvent):
    """A step has closed, or a late shard was folded into a closed step."""


@dataclass(frozen=True, slots=True)
class ScalarsChanged(StepEvent):
    """A closed step received scalars. Scalars that come before the step closes publish nothing."""


@dataclass(frozen=True, slots=True)
class MeasurementsChanged(StepEvent):
    """A closed step received measurements of replayed scores."""


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """A run resumed at `resume_step`; the steps of older attempts from there on are superseded."""

    run_id: str
    attempt: int
    resume_step: int


@dataclass(frozen=True, slots=True)
class ModelKindChanged:
    """Another kind of model holds for a run: it was declared, or derived from a checkpoint; None: unknown."""

    run_id: str
    model_kind: ModelKind | None


@dataclass(frozen=True, slots=True)
class AdviceModeChanged:
    """A run changed between `shadow` and `apply`."""

    run_id: str
    mode: str
