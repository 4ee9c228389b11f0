"""The detectors over many closed steps at once, with the result of one step after the other.

In most steps of a run nothing fires. Each part of the state is checked over a whole stretch of steps by array
operations; if nothing can fire in it, its state after the last step follows from a few values. A part for which this
cannot be said goes step by step, by the same functions that `advance` calls.
"""

from __future__ import annotations

from foreshock.early_warning.stretches.advance import advance_over
from foreshock.early_warning.stretches.columns import ClosedSteps

__all__ = ["ClosedSteps", "advance_over"]
