"""The token pass as machine code: the same sums as `numpy_pass`, several times faster, without the interpreter's lock.

It needs numba (the extra `fast`), which is imported only by the functions here. `prepare()` compiles, which takes
seconds the first time, or loads what numba has kept on disk; from then on `token_pass` uses this pass.
"""

from __future__ import annotations

import importlib.util

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.statistics.rollout_sums import RolloutSums

__all__ = ["available", "compute_verl_metrics", "is_prepared", "prepare", "sum_rollouts_compiled"]

_prepared = False
_threads: int | None = None


def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def is_prepared() -> bool:
    """Whether `prepare()` has run in this process."""
    return _prepared


def prepare(threads: int | None = None) -> None:
    """Compile, or load what was compiled before: one machine code serves every type of input.

    `threads` is how many later calls take that do not say it themselves (None: one for each processor). Where no folder
    can be written to for numba's cache, it compiles in every process. Raises ImportError without numba.
    """
    global _prepared, _threads
    from foreshock.measures.passes.compiled.compilation import compiled_functions

    compiled_functions()
    _prepared, _threads = True, threads


def sum_rollouts_compiled(inputs: TokenInputs, threads: int | None = None) -> RolloutSums:
    """The sums of every rollout, and of all of them together, as `sum_rollouts_numpy` gives them.

    Integers, extremes and largest values are equal to numpy's; sums to 1e-12 of the sum of absolute values. `threads`
    (None: as prepared) changes nothing but the time. Raises ImportError without numba.
    """
    from foreshock.measures.passes.compiled.threaded_pass import sum_rollouts_in_lanes

    return sum_rollouts_in_lanes(inputs, threads or _threads)


def compute_verl_metrics(inputs: TokenInputs, threads: int | None = None) -> dict[str, float]:
    """verl's thirteen off-policy metrics and nothing else, several times as fast as all there is.

    They are, by the registry's columns: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `kl`,
    `k3_kl`, `log_ppl_diff`, `log_ppl_abs_diff`, `log_ppl_diff_max`, `log_ppl_diff_min`, `ppl_ratio`, `verl_chi2_token`
    and `verl_chi2_seq`, with the values that `ComparisonStatistics.measures()` gives. Of `inputs` only `target`,
    `behaviour`, `offsets` and `generated` are used. NaN where nothing was measured. Raises ImportError without numba.
    """
    from foreshock.measures.passes.compiled.verl_metrics import verl_metrics_in_lanes

    return verl_metrics_in_lanes(inputs, threads or _threads)
