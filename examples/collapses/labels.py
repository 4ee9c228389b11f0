"""The labels of a run: whether and when it collapsed, and what kind of collapse it was.

Committed before the first run of the grid. The collapse is defined by `foreshock.diagnosis.collapse`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from foreshock.diagnosis.collapse import collapse_step

REWARD_FLOOR: Final = 0.0
"""The reward of a policy that learned nothing: random characters end with the right sum in no case that was seen."""

Kind = Literal["none", "mismatch", "learning rate", "unknown"]


def label(steps: Sequence[int], rewards: Sequence[float]) -> int | None:
    """Return the step of the collapse, None if the run did not collapse. ``rewards`` are those of the training
    rollouts, one value for each of ``steps``."""
    return collapse_step(steps, rewards, REWARD_FLOOR)


def kind_of(run: str, twin: str, collapses: Mapping[str, int | None]) -> Kind:
    """Return the kind of a run's collapse.

    ``twin`` is the run with the same learning rate and seed and no mismatch; ``collapses`` has the step of each
    finished run. A collapse is one of mismatch only if the twin did not collapse, and unknown until the twin is
    finished.
    """
    if collapses[run] is None:
        return "none"
    if twin not in collapses:
        return "unknown"
    return "mismatch" if collapses[twin] is None else "learning rate"
