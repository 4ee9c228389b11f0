"""Events of rules and detectors: plain data with the reason and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foreshock.severity import Severity

Change = Literal["fired", "cleared"]
Evidence = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Event:
    """A rule that fired at ``step``, or one that fired at ``fired_step`` and clears at ``step``.

    If ``moves_learning_rate``, the event alone lets the advice lower the learning rate; absolute crossings never do.
    """

    rule: str
    step: int
    value: float
    threshold: float
    severity: Severity
    why: str
    what_to_do: str
    moves_learning_rate: bool = False
    evidence: Evidence = field(default_factory=dict)
    change: Change = "fired"
    fired_step: int = -1

    def __post_init__(self) -> None:
        if self.change == "fired" and self.fired_step == -1:
            object.__setattr__(self, "fired_step", self.step)

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "step": self.step,
            "value": self.value,
            "threshold": self.threshold,
            "severity": self.severity,
            "why": self.why,
            "what_to_do": self.what_to_do,
            "moves_learning_rate": self.moves_learning_rate,
            "evidence": dict(self.evidence),
            "change": self.change,
            "fired_step": self.fired_step,
        }
