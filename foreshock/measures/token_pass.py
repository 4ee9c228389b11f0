"""Which of the two passes over the tokens is used: the compiled one where it was prepared, else numpy's."""

from __future__ import annotations

from foreshock.measures import compiled
from foreshock.measures.numpy_pass import sum_rollouts_numpy
from foreshock.measures.rollout_sums import RolloutSums, TokenInputs

__all__ = ["sum_rollouts"]


def sum_rollouts(inputs: TokenInputs) -> RolloutSums:
    """The sums of every rollout, and of all of them together."""
    return compiled.sum_rollouts_compiled(inputs) if compiled.is_prepared() else sum_rollouts_numpy(inputs)
