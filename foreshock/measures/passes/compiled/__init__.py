"""The token pass as machine code: the sums of `numpy_pass`, several times faster and without the GIL.

It needs numba (the extra `fast`), which only the functions here import. `prepare()` compiles, which takes seconds the
first time, or loads the machine code from numba's cache on disk. After that `passes.sum_rollouts` uses this pass.
"""

from __future__ import annotations

import importlib.util

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.statistics.rollout_sums import RolloutSums

__all__ = ["available", "compute_verl_metrics", "is_prepared", "prepare", "sum_rollouts_compiled"]

_prepared = False
_threads: int | None = None


def available() -> bool:
    """Return True if numba is installed."""
    return importlib.util.find_spec("numba") is not None


def is_prepared() -> bool:
    """Return True if `prepare()` has run in this process."""
    return _prepared


def prepare(threads: int | None = None) -> None:
    """Compile, or load the machine code of an earlier process. One machine code serves all input types.

    `threads` is the default number of threads of later calls (None: one per processor). Without a writable folder for
    numba's cache, every process compiles. Raises ImportError without numba.
    """
    global _prepared, _threads
    from foreshock.measures.passes.compiled.compilation import compiled_functions

    compiled_functions()
    _prepared, _threads = True, threads


def sum_rollouts_compiled(inputs: TokenInputs, threads: int | None = None) -> RolloutSums:
    """Return the sums of each rollout and of all rollouts together, as `sum_rollouts_numpy` does.

    Integers, extremes and largest values equal numpy's; float sums agree to 1e-12 of the sum of absolute values.
    `threads` (None: the value given to `prepare`) changes the time only. Raises ImportError without numba.
    """
    from foreshock.measures.passes.compiled.threaded_pass import sum_rollouts_in_lanes

    return sum_rollouts_in_lanes(inputs, threads or _threads)


def compute_verl_metrics(inputs: TokenInputs, threads: int | None = None) -> dict[str, float]:
    """Return verl's thirteen off-policy metrics, several times faster than all measures.

    Keys are the registry's columns: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `kl`,
    `k3_kl`, `log_ppl_diff`, `log_ppl_abs_diff`, `log_ppl_diff_max`, `log_ppl_diff_min`, `ppl_ratio`, `verl_chi2_token`
    and `verl_chi2_seq`, with the values of `ComparisonStatistics.measures()`. Only `target`, `behaviour`, `offsets` and
    `generated` of `inputs` are used. Values are NaN if no token was measured. Raises ImportError without numba.
    """
    from foreshock.measures.passes.compiled.verl_metrics import verl_metrics_in_lanes

    return verl_metrics_in_lanes(inputs, threads or _threads)
