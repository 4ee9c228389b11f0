"""Compare the speed of the measures with verl's own functions: `make bench-measures`.

The batch has 1024 rollouts of 100–8192 tokens, 3.0 M in all; verl gets it padded to [1024, 8192] (not timed). verl's
thirteen metrics are compared with its `compute_offpolicy_metrics`. Everything (every measure with its intervals, all
tables by probability, position, turn, length, entropy, lag and token id, advantages, and every correction evaluated) is
compared with its `compute_rollout_correction_and_rejection_mask`. One process, interleaved, medians. GPUs, on which
verl's tensors may be, are not covered. A test checks that the values are equal
(tests/foreshock/measures/test_against_verl.py).

Bars: 20 times as fast for the thirteen, 12 times for everything.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Line, report
from foreshock.corrections import Evaluator
from foreshock.measures.comparison import compare
from foreshock.measures.inputs import TokenInputs, token_inputs
from foreshock.measures.passes import compiled
from foreshock.measures.passes.measured import measured_tokens
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.attributes import BatchAttributes
from tests.foreshock.measures import verl_reference as verl

BAR_THIRTEEN, BAR_EVERYTHING = 20.0, 12.0
ROLLOUTS, SHORTEST, LONGEST = 1024, 100, 8192
ROUNDS = 9


def training_batch(rollouts: int = ROLLOUTS, seed: int = 0) -> RolloutBatch:
    """Return rollouts with every column, and a heavy-tailed mismatch like that of bf16 kernels.

    Groups of 8, two turns, lags 0–3, Zipf-distributed ids of a vocabulary of 151 936.
    """
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(7.8, 0.8, rollouts), SHORTEST, LONGEST).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    size = int(offsets[-1])
    behaviour = -random.exponential(0.5, size).astype(np.float32)
    d = random.normal(0, 0.02, size) * random.exponential(1, size)
    ids = np.minimum(random.zipf(1.3, size), 151_935).astype(np.int32)
    place = np.arange(size) - np.repeat(offsets[:-1], lengths)
    return RolloutBatch(
        sample_ids=[str(row) for row in range(rollouts)],
        prompt_token_ids=np.zeros(rollouts, np.int32),
        prompt_offsets=np.arange(rollouts + 1, dtype=np.int64),
        response_token_ids=ids,
        response_offsets=offsets,
        rollout_log_probs=behaviour,
        trainer_log_probs=np.minimum(behaviour + d, 0).astype(np.float32),
        response_mask=np.ones(size, np.uint8),
        entropy=random.exponential(0.5, size).astype(np.float32),
        turn=(2 * place > np.repeat(lengths, lengths)).astype(np.int16),
        weights_version=np.repeat(random.integers(0, 4, rollouts), lengths).astype(np.int32),
        group_ids=[f"prompt {row // 8}" for row in range(rollouts)],
        reward=random.integers(0, 2, rollouts).astype(np.float32),
        advantage=random.normal(0, 1, rollouts).astype(np.float32),
        attributes=BatchAttributes(trainer_weights_version=3),
    )


def everything(batch: RolloutBatch) -> None:
    """Compute everything about a batch: the work to which the bar applies."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    comparison = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs)
    comparison.measures()
    for name in comparison.statistics.conditions:
        comparison.statistics.condition_table(name)
    comparison.statistics.token_id_table()
    Evaluator(comparison.statistics, comparison.summaries).evaluate_usual()


def inputs_of(batch: RolloutBatch) -> TokenInputs:
    """Return only the log-probs."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    return TokenInputs(batch.trainer_log_probs, batch.rollout_log_probs, batch.response_offsets)


def all_inputs_of(batch: RolloutBatch) -> TokenInputs:
    """Return every column of the token pass."""
    bare = inputs_of(batch)
    return token_inputs(
        bare.target,
        bare.behaviour,
        bare.offsets,
        batch.response_mask,
        entropy=batch.entropy,
        turn=batch.turn,
        lag=batch.weights_version,
        token_ids=batch.response_token_ids,
        advantage=batch.advantage,
    )


def verl_metrics(inputs: TokenInputs) -> dict[str, float]:
    """Return verl's thirteen off-policy metrics, several times faster than all measures.

    Keys are the registry's columns: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `kl`,
    `k3_kl`, `log_ppl_diff`, `log_ppl_abs_diff`, `log_ppl_diff_max`, `log_ppl_diff_min`, `ppl_ratio`, `verl_chi2_token`
    and `verl_chi2_seq`, with the values of `ComparisonStatistics.measures()`. Only `target`, `behaviour`, `offsets` and
    `generated` of `inputs` are used. Values are NaN if no token was measured. Raises ImportError without numba.
    """
    bare, _, counts = measured_tokens(TokenInputs(inputs.target, inputs.behaviour, inputs.offsets, inputs.generated))
    totals = compiled.new_totals(inputs.offsets.size - 1, 0)
    compiled._machine_code()(compiled._columns(bare, None, None), compiled._layout(), totals, False)
    measured, total = counts.tokens > 0, float(counts.tokens.sum())
    sums = dict(zip(TOKEN_SUMS, totals.sums[measured].T, strict=True))
    of_all, k3, above, chi2 = (sums[name] for name in ("d", "k3_kl", "ratio_minus_one", "chi2_token"))
    # Only whole sequences have a ratio.
    whole = counts.whole()[measured]
    tokens, d = counts.tokens[measured][whole], of_all[whole]
    log_ppl_diff = -d / tokens
    target, behaviour = (-sums[name][whole] / tokens for name in ("log_target", "log_behaviour"))
    with np.errstate(over="ignore", under="ignore"):
        return {
            "training_ppl": _mean(np.exp(target)),
            "training_log_ppl": _mean(target),
            "rollout_ppl": _mean(np.exp(behaviour)),
            "rollout_log_ppl": _mean(behaviour),
            "kl": -float(of_all.sum()) / total if total else math.nan,
            "k3_kl": float(k3.sum()) / total if total else math.nan,
            "log_ppl_diff": _mean(log_ppl_diff),
            "log_ppl_abs_diff": _mean(np.abs(log_ppl_diff)),
            "log_ppl_diff_max": float(log_ppl_diff.max()) if d.size else math.nan,
            "log_ppl_diff_min": float(log_ppl_diff.min()) if d.size else math.nan,
            "ppl_ratio": 1.0 + _mean(np.expm1(log_ppl_diff)),
            # ρ² − 1 = (ρ − 1)² + 2(ρ − 1)
            "verl_chi2_token": float((chi2 + 2.0 * above).sum()) / total if total else math.nan,
            "verl_chi2_seq": _mean(np.expm1(2.0 * d)),
        }


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else math.nan


def padded(batch: RolloutBatch) -> verl.Padded:
    bare = inputs_of(batch)
    return verl.Padded.of(bare.target, bare.behaviour, bare.offsets, width=LONGEST)


def milliseconds(work: Callable[[], object]) -> float:
    """Return the duration of `work` without garbage collection, as timeit does."""
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)
    finally:
        gc.enable()


def measure_speed(batch: RolloutBatch) -> tuple[float, float]:
    """Return the speed-ups over verl, for its thirteen metrics and for everything."""
    tensors, bare, full = padded(batch), inputs_of(batch), all_inputs_of(batch)
    works: dict[str, Callable[[], object]] = {
        "verl's compute_offpolicy_metrics": lambda: verl.off_policy_metrics(tensors),
        "its thirteen, compiled": lambda: verl_metrics(bare),
        "verl's correction and rejection mask": lambda: verl.correct(tensors, **verl.FULL_CORRECTION),
        "everything": lambda: everything(batch),
        "  of which the compiled pass": lambda: compiled.sum_rollouts_compiled(full),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(milliseconds(work))
    times["  the pass in numpy, once"] = [milliseconds(lambda: sum_rollouts_numpy(full))]
    medians = {name: statistics.median(values) for name, values in times.items()}
    tokens = int(batch.response_offsets[-1])
    print(f"\n{tokens} tokens in {batch.num_rollouts} rollouts: median of {ROUNDS} rounds, interleaved")
    for name, median in medians.items():
        fastest = min(times[name])
        print(f"{name:38s} {median:9.1f} ms   fastest {fastest:9.1f} ms   {1e6 * median / tokens:7.2f} ns a token")
    thirteen, correction = (medians[name] for name in list(works)[0:3:2])
    return thirteen / medians["its thirteen, compiled"], correction / medians["everything"]


def main() -> int:
    try:
        verl.require()
    except verl.VerlMissingError as error:
        print(error, file=sys.stderr)
        return 2
    compiled.prepare()
    thirteen, all_of_it = measure_speed(training_batch())
    return report(
        [
            Line("thirteen_times_as_fast", "verl's thirteen, times as fast", thirteen, BAR_THIRTEEN, at_least=True),
            Line("everything_times_as_fast", "everything, times as fast", all_of_it, BAR_EVERYTHING, at_least=True),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
