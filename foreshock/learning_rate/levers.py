"""The levers beside the learning rate: a correction of the loss, and a rollback to a checkpoint.

A lever is a list of points, each with the value from its step on; None: nothing is advised, and the trainer does what
its configuration says. As the rate, a lever is absolute, in shadow or in apply mode, and may be held by an operator.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from foreshock.api.records import parse
from foreshock.corrections import Threshold, correction_named
from foreshock.corrections.loss_weights import TRAINED
from foreshock.errors import InvalidArgumentError
from foreshock.learning_rate.modes import Author, BesideTheRate


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction of the loss: its name in the catalogue and its threshold as text, `"2"` or `"0.5_5"`.

    Raises InvalidArgumentError for one that has no weights, or a threshold that does not fit it.
    """

    kind: str
    threshold: str

    def __post_init__(self) -> None:
        self.bounds  # noqa: B018  # Raises.

    @property
    def bounds(self) -> Threshold:
        """The threshold as numbers."""
        if self.kind not in TRAINED:
            known = ", ".join(TRAINED)
            raise InvalidArgumentError(f"unknown correction {self.kind!r}; corrections: {known}", "correction")
        return correction_named(self.kind).threshold(self.threshold)

    @property
    def words(self) -> str:
        """The correction in words, such as "token TIS at 2"."""
        return f"{correction_named(self.kind).title} at {self.threshold}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the correction of `kind`, at its first usual threshold, or of `kind:threshold`.

        Raises InvalidArgumentError.
        """
        kind, _, threshold = text.partition(":")
        usual = correction_named(kind).usual
        return cls(kind, threshold or (str(usual[0]) if usual else ""))


@dataclass(frozen=True, slots=True)
class Rollback:
    """A checkpoint to go back to: its weights sample `step`, at which the run then resumes; and the command for it."""

    step: int
    root: str
    path: str
    command: str = ""


Value = Correction | Rollback


def lever_of(value: Value) -> BesideTheRate:
    """Return the lever that a value is of."""
    return "correction" if isinstance(value, Correction) else "rollback"


@dataclass(frozen=True, slots=True)
class LeverPoint:
    """The value of a lever from `step` on."""

    step: int
    value: Value | None


@dataclass(frozen=True, slots=True)
class LeverState:
    """A lever: its mode, its points in ascending order, since when and by whom it is held, and the newest reason.

    `asked` is the correction that the trainer or an operator wants if one is advised. `operated` is the revision, the
    kind and the reason of an operator's newest decision.
    """

    mode: str = "shadow"
    points: tuple[LeverPoint, ...] = ()
    held_from_step: int | None = None
    held_by: Author | None = None
    asked: Correction | None = None
    reason: str = ""
    operated: tuple[int, str, str] | None = None
    mode_is_chosen: bool = False

    @property
    def last(self) -> Value | None:
        """The newest value."""
        return self.points[-1].value if self.points else None

    def advised(self, step: int) -> Value | None:
        """Return the advised value at `step`, in either mode."""
        return next((point.value for point in reversed(self.points) if point.step <= step), None)

    def at(self, step: int) -> Value | None:
        """Return the value to apply at `step`: `advised`, or None in shadow mode."""
        return self.advised(step) if self.mode == "apply" else None

    def since(self, step: int) -> int:
        """Return the step since which the value of `step` is advised."""
        return max((point.step for point in self.points if point.step <= step), default=0)

    def with_value(self, step: int, value: Value | None) -> LeverState:
        """Return the state with a value from `step` on."""
        kept = tuple(point for point in self.points if point.step < step)
        return replace(self, points=(*kept, LeverPoint(step, value)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LeverState:
        """Parse a state; unknown keys are ignored. Raises KeyError, TypeError or ValueError."""
        found = parse(cls, value)
        return replace(found, points=tuple(sorted(found.points, key=lambda point: operator.index(point.step))))


UNMOVED: Final = LeverState()
"""A lever before any decision."""
