"""Passes over the tokens of a batch: a numpy reference and a compiled pass, which give the same sums.

`sum_rollouts` uses the compiled pass if `compiled.prepare()` has run in this process, else numpy. Without that call
nothing is compiled and numba is not imported: compiling takes seconds.
"""

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes import compiled
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from foreshock.measures.statistics.rollout_sums import RolloutSums

__all__ = ["compiled", "sum_rollouts"]


def sum_rollouts(inputs: TokenInputs) -> RolloutSums:
    """Return the sums of each rollout, and of all of them together."""
    if compiled.is_prepared():
        return compiled.sum_rollouts_compiled(inputs)
    return sum_rollouts_numpy(inputs)
