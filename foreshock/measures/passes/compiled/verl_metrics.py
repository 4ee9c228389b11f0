"""verl's thirteen off-policy metrics, for a training loop that needs them at every step."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.compilation import compiled_functions
from foreshock.measures.passes.compiled.input_columns import batch_columns
from foreshock.measures.passes.compiled.lane_state import new_state
from foreshock.measures.passes.compiled.threaded_pass import lane_cuts, run_lanes
from foreshock.measures.statistics.rollout_sums import RolloutSums

__all__ = ["verl_metrics_in_lanes"]


def verl_metrics_in_lanes(inputs: TokenInputs, threads: int | None) -> dict[str, float]:
    """Return the thirteen metrics by registry column; NaN if no token was measured."""
    rollouts = _verl_sums(inputs, threads)
    measured = rollouts.tokens > 0
    tokens = rollouts.tokens[measured].astype(np.float64)
    d, k3, above, chi2 = (rollouts.column(name)[measured] for name in ("d", "k3_kl", "ratio_minus_one", "chi2_token"))
    total = float(tokens.sum())
    log_ppl_diff = -d / tokens
    target, behaviour = (-rollouts.column(name)[measured] / tokens for name in ("log_target", "log_behaviour"))
    with np.errstate(over="ignore", under="ignore"):
        return {
            "training_ppl": _mean(np.exp(target)),
            "training_log_ppl": _mean(target),
            "rollout_ppl": _mean(np.exp(behaviour)),
            "rollout_log_ppl": _mean(behaviour),
            "kl": -float(d.sum()) / total if total else math.nan,
            "k3_kl": float(k3.sum()) / total if total else math.nan,
            "log_ppl_diff": _mean(log_ppl_diff),
            "log_ppl_abs_diff": _mean(np.abs(log_ppl_diff)),
            "log_ppl_diff_max": float(log_ppl_diff.max()) if total else math.nan,
            "log_ppl_diff_min": float(log_ppl_diff.min()) if total else math.nan,
            "ppl_ratio": 1.0 + _mean(np.expm1(log_ppl_diff)),
            # ρ² − 1 = (ρ − 1)² + 2(ρ − 1)
            "verl_chi2_token": float((chi2 + 2.0 * above).sum()) / total if total else math.nan,
            "verl_chi2_seq": _mean(np.expm1(2.0 * d)),
        }


def _verl_sums(inputs: TokenInputs, threads: int | None) -> RolloutSums:
    """Return `tokens` and the sums of d, ρ and log-probs of each rollout; all other fields are 0."""
    functions, batch = compiled_functions(), batch_columns(inputs)
    rollouts = inputs.offsets.size - 1
    result = RolloutSums.empty(rollouts)
    if rollouts == 0:
        return result
    counts = np.zeros((rollouts, layout.ROLLOUT_COUNTS), np.int64)
    cuts = lane_cuts(batch.columns.offsets, 0).tolist()
    nothing = np.zeros((0, layout.ID_COLUMNS))
    states = [new_state(result.sums, result.sums, counts, nothing) for _ in cuts[1:]]

    def add_lane(lane: int) -> None:
        functions.sum_verl_lane(batch.columns, states[lane], cuts[lane], cuts[lane + 1])

    run_lanes(add_lane, len(states), threads)
    result.tokens = counts[:, layout.TOKENS].copy()
    return result


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else math.nan
