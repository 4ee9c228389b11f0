"""Measure which interval covers if few tokens dominate the mean. `python -m benchmarks.heavy_tails`

The coverage experiment over policies with heavier and heavier tails: even and uneven prompts, three levels of rounding,
each with and without "flips", one state in 500 that π computes with four bits fewer, like a router that chose another
expert. A line gives a batch's diagnostics (the medians of k̂ of ρ and of the share of k3 from a thousandth of the
tokens) and how often the two kinds of 95 % interval contain the exact value. The rule in docs/measures.md follows from
it. There is no bar: several of these cannot be covered from one batch, and the result is which.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.coverage import LEVELS, MEASURES, MOST_PROMPTS, ROLLOUTS_OF_A_PROMPT, divergences
from benchmarks.tiny_policy import PROMPTS, Sampler, TinyPolicy, Traits
from foreshock.measures.estimators.bootstrap import bootstrap_intervals
from foreshock.measures.estimators.intervals import Interval, clustered_interval
from foreshock.measures.estimators.pareto import pareto_shape
from foreshock.measures.statistics.tails import LARGEST_VALUES

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

SEEDS = (1, 2, 3, 4)
BATCHES = 60
FLIPPED_STATES = 0.002
FLIPPED_BITS = 4
POLICIES = {
    "even": Traits(),
    "between": Traits(prompt_size=0.5, sharpness=(1.5, 0.3), outliers=6.0),
    "uneven": Traits(prompt_size=1.0, sharpness=(1.5, 0.5), outliers=6.0),
}


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch at one level: its diagnostics, and the intervals that held; `held` [measures, 2]:

    Student's, bootstrap.
    """

    pareto_k: float
    top_share: float
    held: NDArray[np.bool_]


def flipped(seed: int, bits: int, traits: Traits) -> TinyPolicy:
    """Return π with `bits` bits, some of its states computed with fewer."""
    fine = TinyPolicy.of(seed, bits, traits).log_probs
    coarse = TinyPolicy.of(seed, max(2, bits - FLIPPED_BITS), traits).log_probs
    chosen = np.random.default_rng(seed + 77).random(fine.shape[:3]) < FLIPPED_STATES
    return TinyPolicy(np.where(chosen[..., None], coarse, fine))


def draw(sampler: Sampler, random: np.random.Generator) -> tuple[Int64, Int64]:
    """Return the rollout and the index in `log_probs.ravel()` of each token of one batch."""
    prompts = np.repeat(random.integers(0, PROMPTS, MOST_PROMPTS), ROLLOUTS_OF_A_PROMPT)
    steps = list(sampler.responses(prompts, random))
    return np.concatenate([running for running, _ in steps]), np.concatenate([places for _, places in steps])


def holds(interval: Interval, exact: float) -> bool:
    """Return True if the interval contains the exact value."""
    return interval.low <= exact <= interval.high


def batch_results(seed: int, traits: Traits, flips: bool) -> dict[int, list[BatchResult]]:
    """Return the results of BATCHES batches of one policy, by level."""
    behaviour = TinyPolicy.of(seed, None, traits)
    targets = [flipped(seed, bits, traits) if flips else TinyPolicy.of(seed, bits, traits) for bits in LEVELS]
    values = np.concatenate([divergences(behaviour, target) for target in targets], axis=-1)
    totals, length = behaviour.expectations(values)
    exact, table = totals / length, values.reshape(-1, values.shape[-1])
    differences = [(target.log_probs - behaviour.log_probs).ravel() for target in targets]
    sampler, random = Sampler.of(behaviour), np.random.default_rng([seed, int(flips)])
    groups = np.repeat(np.arange(MOST_PROMPTS), ROLLOUTS_OF_A_PROMPT)
    seen: dict[int, list[BatchResult]] = {bits: [] for bits in LEVELS}
    for _ in range(BATCHES):
        rollouts, places = draw(sampler, random)
        tokens, of_tokens = np.bincount(rollouts, minlength=groups.size), table[places]
        sums = np.zeros((groups.size, of_tokens.shape[1]))
        for column in range(sums.shape[1]):
            sums[:, column] = np.bincount(rollouts, of_tokens[:, column], groups.size)
        bootstrapped = bootstrap_intervals(sums, tokens, groups)
        for level, bits in enumerate(LEVELS):
            columns = range(len(MEASURES) * level, len(MEASURES) * (level + 1))
            held = np.array(
                [
                    [
                        holds(clustered_interval(sums[:, column], tokens, groups), exact[column]),
                        holds(bootstrapped[column], exact[column]),
                    ]
                    for column in columns
                ]
            )
            d, k3 = differences[level][places], np.sort(of_tokens[:, columns[0]])
            shape = pareto_shape(np.sort(d)[::-1][:LARGEST_VALUES], d.size)
            seen[bits].append(BatchResult(shape, float(k3[-(d.size // 1000) :].sum() / k3.sum()), held))
    return seen


def main() -> int:
    start = time.perf_counter()
    print(f"{'':38s} {'k3':^20s}  {'χ²':^20s}  {'TV':^20s}")
    print(f"{'prompts':8s} {'flips':5s} bits {'k̂':>6s} {'top 0.1 %':>10s}  " + "  Student  bootstrap  " * len(MEASURES))
    for name, traits in POLICIES.items():
        for flips in (False, True):
            runs = [batch_results(seed, traits, flips) for seed in SEEDS]
            for bits in LEVELS:
                seen = [one for run in runs for one in run[bits]]
                held = np.mean([one.held for one in seen], axis=0)
                shape = np.median([one.pareto_k for one in seen])
                share = np.median([one.top_share for one in seen])
                cells = "".join(f"  {student:7.1%}  {bootstrap:9.1%}  " for student, bootstrap in held)
                print(
                    f"{name:8s} {'yes' if flips else 'no':5s} {bits:4d} {shape:5.2f} {share:10.0%}  {cells}", flush=True
                )
    print(f"policies={len(SEEDS)} batches={BATCHES * len(SEEDS)} seconds={time.perf_counter() - start:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
