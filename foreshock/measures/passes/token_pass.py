"""Which of the two passes over the tokens is used: the compiled one where it was prepared, else numpy's.

Both give the same numbers (see `rollout_sums.py`). Compiling takes seconds, so a process that wants it says so once, by
`compiled.prepare()`; nothing here compiles, or imports numba, on its own.
"""

from __future__ import annotations

from foreshock.measures.passes import compiled
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from foreshock.measures.passes.rollout_sums import RolloutSums, TokenInputs

__all__ = ["sum_rollouts"]


def sum_rollouts(inputs: TokenInputs) -> RolloutSums:
    """The sums of every rollout, and of all of them together."""
    if compiled.is_prepared():
        return compiled.sum_rollouts_compiled(inputs)
    return sum_rollouts_numpy(inputs)
