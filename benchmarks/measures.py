"""Compare the measures with verl's own functions: values, speed and memory. `make bench-measures`.

1. Every measure that both define, on random batches with |d| from 1e-6 to 30, on the repository's recorded run, and on
   other recorded runs if available: the largest difference, relative, or absolute if verl's value is below 1e-6.
   verl gets float64 tensors, in which its formulas are accurate; its float32 results for the same tokens are printed
   beside them. Values affected by its clamp of d to ±20 differ by definition and are not compared.
2. Speed, on 1024 rollouts of 100–8192 tokens, 3.0 M in all, which verl gets padded to [1024, 8192] (not timed):
   verl's thirteen against its `compute_offpolicy_metrics`; everything (every measure with its intervals, all tables by
   probability, position, turn, length, entropy, lag and token id, advantages, and every correction evaluated) against
   its `compute_rollout_correction_and_rejection_mask`. One process, interleaved, medians.
3. Peak memory beyond the input, each in a process of its own.
4. Time by the number of tokens, the fastest of all rounds.
5. Coverage of the 95 % intervals (benchmarks/coverage.py, with its own table).

Not covered: GPUs, on which verl's tensors may be.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks import verl_reference as verl
from benchmarks.coverage import measure_coverage
from benchmarks.recorded_runs import SHARED, recorded_runs
from foreshock.corrections import evaluate_usual
from foreshock.measures.comparison import compare
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.inputs import TokenInputs, token_inputs
from foreshock.measures.passes import compiled
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.attributes import BatchAttributes

BAR_EQUAL = 1e-6
BAR_THIRTEEN, BAR_EVERYTHING = 20.0, 12.0
BAR_MEMORY = 2.0
# Time per token of the largest size over that of the smallest.
BAR_LINEAR = 1.25

ROLLOUTS, SHORTEST, LONGEST = 1024, 100, 8192
ROUNDS = 9
# verl clamps d to ±20 before it squares ρ.
VERL_CLAMP = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """log π, log μ and the mask of N rollouts."""

    name: str
    target: NDArray[np.floating]
    behaviour: NDArray[np.floating]
    offsets: NDArray[np.int64]
    mask: NDArray[np.uint8] | None = None


def training_batch(rollouts: int = ROLLOUTS, seed: int = 0) -> RolloutBatch:
    """Return rollouts with every column, and a mismatch as of bf16 kernels, with heavy tails.

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


def random_tokens(size: float, seed: int) -> Tokens:
    """Return 64 rollouts whose |d| is about `size`, with masked tokens; log-probs that float64 represents exactly."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 400, 64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = int(offsets[-1])
    behaviour = -random.exponential(1.0 + size, tokens)
    d = random.choice([-1.0, 1.0], tokens) * size * random.uniform(0.5, 1.0, tokens)
    target = np.minimum(behaviour + d, 0.0)
    mask = (random.random(tokens) < 0.95).astype(np.uint8)
    mask[offsets[:-1]] = 1
    return Tokens(f"|d| about {size:g}", target.astype(np.float32), behaviour.astype(np.float32), offsets, mask)


def all_tokens() -> Iterator[Tokens]:
    for seed, size in enumerate((1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 5.0, 10.0, 30.0)):
        yield random_tokens(size, seed)
    for run in recorded_runs():
        for step in run.steps():
            batch = run.rollouts(step)
            target, behaviour = batch.trainer_log_probs, batch.rollout_log_probs
            if target is None or behaviour is None:
                continue
            mask = np.asarray(batch.generated & np.isfinite(target) & np.isfinite(behaviour), np.uint8)
            # verl multiplies by its mask, which keeps NaN.
            target, behaviour = np.where(mask, target, 0), np.where(mask, behaviour, 0)
            yield Tokens(f"{run.name}, step {step}", target, behaviour, batch.response_offsets, mask)


def difference(ours: float, theirs: float) -> float:
    """Return the difference relative to verl's value, or to 1e-6 if that is larger."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    return abs(ours - theirs) / max(abs(theirs), 1e-6)


@dataclass(slots=True)
class Worst:
    """The largest difference, and its tokens."""

    value: float = 0.0
    where: str = ""

    def update(self, value: float, where: str) -> None:
        if not value <= self.value:
            self.value, self.where = value, where


def beyond_clamp(tokens: Tokens) -> set[str]:
    """Return verl's measures that its clamp to ±20 affects."""
    kept = np.ones(tokens.target.size) if tokens.mask is None else tokens.mask
    d = (tokens.target.astype(np.float64) - tokens.behaviour) * kept
    found = set()
    if np.abs(d).max() > VERL_CLAMP:
        found.add("chi2_token")
    if np.abs(np.add.reduceat(d, tokens.offsets[:-1])).max() > VERL_CLAMP:
        found.add("chi2_seq")
    return found


def compare_with_verl() -> tuple[float, int]:
    """Return the largest difference over all measures, and the number of batches."""
    double = {name: Worst() for name in verl.OURS}
    single = {name: Worst() for name in verl.OURS}
    batches = 0
    for tokens in all_tokens():
        columns = tokens.target, tokens.behaviour, tokens.offsets, tokens.mask
        ours = ComparisonStatistics.of(*columns).measures()
        thirteen = compiled.compute_verl_metrics(token_inputs(*columns))
        clamped = beyond_clamp(tokens)
        for is_double, worst in ((True, double), (False, single)):
            padded = verl.Padded.of(*columns, double=is_double)
            theirs = verl.off_policy_metrics(padded) | verl.debug_metrics(padded)
            for name in theirs.keys() - clamped:
                for found in (ours, thirteen):
                    if verl.OURS[name] in found:
                        worst[name].update(difference(found[verl.OURS[name]], theirs[name]), tokens.name)
        batches += 1
    print(f"{'measure of verl':34s} {'float64':>9s} {'float32':>9s}   largest difference; float32 is furthest off on")
    for name in verl.OURS:
        print(f"{name:34s} {double[name].value:9.1e} {single[name].value:9.1e}   {single[name].where}")
    return max(worst.value for worst in double.values()), batches


def everything(batch: RolloutBatch) -> None:
    """Compute everything about a batch: the work that the bar is on."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    comparison = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs)
    comparison.measures()
    for name in comparison.statistics.conditions:
        comparison.statistics.condition_table(name)
    comparison.statistics.token_id_table()
    evaluate_usual(comparison.statistics, comparison.summaries)


def inputs_of(batch: RolloutBatch) -> TokenInputs:
    """Return the log-probs alone."""
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
    """Return the speed-ups over verl: of its thirteen metrics, and of everything."""
    tensors, bare, full = padded(batch), inputs_of(batch), all_inputs_of(batch)
    works: dict[str, Callable[[], object]] = {
        "verl's compute_offpolicy_metrics": lambda: verl.off_policy_metrics(tensors),
        "its thirteen, compiled": lambda: compiled.compute_verl_metrics(bare),
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


def peak_beyond(work: Callable[[], object]) -> int:
    """Return the peak memory of `work` in bytes, beyond the memory in use before. Linux with glibc only."""
    gc.collect()
    # Freed memory that glibc keeps would hide part of the peak.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak
    before = _status("VmRSS")
    work()
    return max(_status("VmHWM") - before, 0)


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name + ":"))


def bytes_of(columns: object, names: tuple[str, ...]) -> int:
    values = [getattr(columns, name) for name in names]
    return sum(value.nbytes for value in values if value is not None)


TOKEN_COLUMNS = (
    "trainer_log_probs", "rollout_log_probs", "response_mask", "entropy", "turn", "weights_version",
    "response_token_ids", "advantage",
)  # fmt: skip
MEMORY_OF = ("thirteen", "everything", "pass", "verl_thirteen", "verl_correction")


def memory_in_this_process(what: str) -> None:
    """Print the peak beyond the input, and the input, in bytes."""
    compiled.prepare()
    small, batch = training_batch(8), training_batch()
    bare = inputs_of(batch)
    of_all = bytes_of(batch, TOKEN_COLUMNS)
    if what.startswith("verl"):
        few, tensors = padded(small), padded(batch)
        run = (
            verl.off_policy_metrics
            if what == "verl_thirteen"
            else (lambda tensors: verl.correct(tensors, **verl.FULL_CORRECTION))
        )
        run(few)
        size = sum(tensor.nbytes for tensor in (tensors.target, tensors.behaviour, tensors.mask))
        print(peak_beyond(lambda: run(tensors)), size)
    elif what == "thirteen":
        compiled.compute_verl_metrics(inputs_of(small))
        print(peak_beyond(lambda: compiled.compute_verl_metrics(bare)), bytes_of(bare, ("target", "behaviour")))
    elif what == "pass":
        compiled.sum_rollouts_compiled(inputs_of(small))
        print(peak_beyond(lambda: compiled.sum_rollouts_compiled(bare)), bytes_of(bare, ("target", "behaviour")))
    else:
        everything(small)
        print(peak_beyond(lambda: everything(batch)), of_all)


def measure_memory() -> float:
    """Return Foreshock's largest peak beyond the input, in multiples of the input."""
    print(f"\n{'memory at its peak':24s} {'beyond input':>14s} {'input':>12s}   ratio")
    largest = 0.0
    for what in MEMORY_OF:
        command = [sys.executable, "-m", "benchmarks.measures", "--memory", what]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
        peak, size = (int(text) for text in answer)
        print(f"{what:24s} {peak / 2**20:10.1f} MiB {size / 2**20:8.1f} MiB   {peak / size:5.2f}")
        if not what.startswith("verl"):
            largest = max(largest, peak / size)
    return largest


def measure_linearity() -> float:
    """Return the time per token of the largest batch over that of the smallest, each the fastest of all rounds."""
    print(f"\n{'tokens':>10s} {'thirteen':>14s} {'the pass':>14s}")
    of_sizes = []
    batches = [training_batch(rollouts) for rollouts in (ROLLOUTS // 4, ROLLOUTS // 2, ROLLOUTS, 2 * ROLLOUTS)]
    columns = [(inputs_of(batch), all_inputs_of(batch)) for batch in batches]
    times: list[list[list[float]]] = [[[], []] for _ in batches]
    for _ in range(ROUNDS):
        for (bare, full), (thirteen_times, pass_times) in zip(columns, times, strict=True):
            thirteen_times.append(milliseconds(partial(compiled.compute_verl_metrics, bare)))
            pass_times.append(milliseconds(partial(compiled.sum_rollouts_compiled, full)))
    for (bare, _), (thirteen_times, pass_times) in zip(columns, times, strict=True):
        tokens = int(bare.offsets[-1])
        of_sizes.append([1e6 * min(values) / tokens for values in (thirteen_times, pass_times)])
        print(f"{tokens:10d} {of_sizes[-1][0]:9.2f} ns/t. {of_sizes[-1][1]:9.2f} ns/t.")
    return float(max(column[-1] / column[0] for column in zip(*of_sizes, strict=True)))


def main() -> int:
    if sys.argv[1:2] == ["--memory"]:
        memory_in_this_process(sys.argv[2])
        return 0
    try:
        verl.require()
    except verl.VerlMissingError as error:
        print(error, file=sys.stderr)
        return 2
    compiled.prepare()
    if not SHARED.is_dir():
        print(f"note: {SHARED.name} is not there beside the repository; only the recorded run that ships is compared")
    largest_difference, batches = compare_with_verl()
    thirteen, all_of_it = measure_speed(training_batch())
    memory = measure_memory()
    linear = measure_linearity()
    print()
    coverage = measure_coverage()
    reached = (
        largest_difference <= BAR_EQUAL
        and thirteen >= BAR_THIRTEEN
        and all_of_it >= BAR_EVERYTHING
        and memory <= BAR_MEMORY
        and linear <= BAR_LINEAR
        and bool(coverage["reached"])
    )
    print(
        f"batches={batches} measures={len(verl.OURS)} largest_difference={largest_difference:.3e} "
        f"thirteen_times_as_fast={thirteen:.2f} everything_times_as_fast={all_of_it:.2f} "
        f"memory_in_inputs={memory:.2f} time_per_token_large_over_small={linear:.2f} "
        f"coverage_reached={str(bool(coverage['reached'])).lower()} reached={str(reached).lower()}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
