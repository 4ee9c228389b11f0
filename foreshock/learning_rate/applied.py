"""What a trainer reported to have applied of the advice, and how the report, the pages and the API tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOT_ACKNOWLEDGED", "SHADOW_EFFECT", "Applied", "effect_in_words"]

NOT_ACKNOWLEDGED = "sent to trainers that ask, not acknowledged"
SHADOW_EFFECT = "shown only, the trainer gets 1.0"


@dataclass(frozen=True, slots=True)
class Applied:
    """The newest acknowledgement of a trainer: the step, the learning rate it used there, and the revision it knew.

    `scale` is the factor that it multiplied its base rate by; None if it reported the rate only.
    """

    step: int
    learning_rate: float
    revision: int
    scale: float | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Applied:
        """Parse the field `applied` of an advice. Raises KeyError, TypeError or ValueError if it is invalid."""
        scale = value.get("scale")
        return cls(
            int(value["step"]), float(value["learning_rate"]), int(value["revision"]),
            None if scale is None else float(scale),
        )  # fmt: skip

    @property
    def words(self) -> str:
        """Return what was applied, such as "applied 0.5 at step 201 (learning rate 5e-07)"."""
        if self.scale is None:
            return f"applied the learning rate {self.learning_rate:g} at step {self.step}"
        return f"applied {self.scale:g} at step {self.step} (learning rate {self.learning_rate:g})"


def effect_in_words(mode: str, revision: int, applied: Applied | None) -> str:
    """Return what is known of the effect of an advice of `revision` in `mode` on the trainer."""
    if mode != "apply":
        return SHADOW_EFFECT if applied is None else f"{SHADOW_EFFECT}; it {applied.words}"
    if applied is None:
        return NOT_ACKNOWLEDGED
    if applied.revision < revision:
        return f"{applied.words} of revision {applied.revision}; revision {revision} is {NOT_ACKNOWLEDGED}"
    return applied.words
