"""The definition of a collapse, by which recorded runs are labelled.

A run has collapsed at the first observation from which, for at least ten observations, the median of the trailing five
rewards is below half of (running best + floor): halfway from the best to the reward of a policy that learned nothing.
An alarm episode is a hit if it starts in [t_c − min(200, t_c / 2), t_c − 3]. Backtests and benchmarks use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TRAILING_VALUES = 5
HELD_OBSERVATIONS = 10
LONGEST_LEAD = 200
SHORTEST_LEAD = 3

SMALL_PENALTY = 0.1
"""If the lowest mean reward is at least −0.1, the reward counts as one from 0 to 1 with small penalties: floor 0."""

BASELINE_OBSERVATIONS = 10
"""Observations that make the baseline. An earlier collapse is unusable for a lead time."""


@dataclass(frozen=True, slots=True)
class HitWindow:
    """The steps, both included, at which an episode may start to be a hit."""

    first: float
    last: int

    def holds(self, step: int) -> bool:
        """Return whether an episode that starts at ``step`` is a hit."""
        return self.first <= step <= self.last


def collapse_step(steps: Sequence[int], rewards: Sequence[float], floor: float) -> int | None:
    """Return the step t_c of the collapse, None if the run did not collapse. ``steps`` and ``rewards`` have one length;
    ``floor`` is the reward of a policy that learned nothing."""
    best, held = None, 0
    for index in range(len(rewards)):
        level = median(rewards[max(index - TRAILING_VALUES + 1, 0) : index + 1])
        best = level if best is None else max(best, level)
        held = held + 1 if level < 0.5 * (best + floor) else 0
        if held == HELD_OBSERVATIONS:
            return steps[index - HELD_OBSERVATIONS + 1]
    return None


def floor_of(lowest: float) -> float:
    """Return the floor to assume if none is documented: 0, −1, or ``lowest``, the lowest reward."""
    if lowest >= -SMALL_PENALTY:
        return 0.0
    return -1.0 if lowest >= -1.0 else lowest


def hit_window(collapse: int) -> HitWindow:
    """Return the steps at which an alarm is a hit of a collapse at step ``collapse``."""
    return HitWindow(collapse - min(LONGEST_LEAD, collapse / 2), collapse - SHORTEST_LEAD)
