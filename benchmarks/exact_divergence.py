"""Measure the cost of exact divergences relative to their two head products alone.

Two heads of 151,936 tokens over the same hidden states: `torch.matmul` of both and `exact_divergences` of both, in one
process, interleaved, medians. First with the CPU's own instruction set, then in processes held to each lower one,
because the speed of bfloat16 products differs several times. On a GPU, if available, against two bfloat16 products.

Bars: at least half the speed of the two products for every shape with the CPU's own instruction set, and memory beyond
the inputs that grows by at most 10 % from 256 to 2048 tokens. Also reported: the largest relative error against
textbook definitions of the same logits in 80-bit numbers; the rounding of torch's products is not part of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from foreshock.instruction_sets import InstructionSet
from foreshock_probes.engines.environment import EngineEnvironment, available_instruction_sets
from foreshock_probes.exact_divergence import LogitSource, exact_divergences
from foreshock_probes.exact_divergence.divergences import VOCABULARY_BLOCK

VOCABULARY = 151_936
REPETITIONS = 3
GPU_REPETITIONS = 15  # milliseconds each
BAR_SPEED = 0.5
BAR_GROWTH = 1.1
NO_SET = "own"  # shown for a CPU without AVX2
# Excludes AVX-512 from the loops that numba compiles; the other variables come from `EngineEnvironment`.
NUMBA_VARIABLES = {InstructionSet.AVX2: {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}}
CHECKED_TOKENS = 8
CPU_SHAPES = (
    (torch.float32, 1024, 256),
    (torch.float32, 2048, 256),
    (torch.bfloat16, 1024, 128),
    (torch.bfloat16, 2048, 128),
)
GPU_SHAPES = ((torch.bfloat16, 1024, 4096), (torch.bfloat16, 2048, 4096), (torch.bfloat16, 4096, 4096))


@dataclass(frozen=True, slots=True)
class Speed:
    """Median seconds of the two products and of the divergences."""

    products: float
    divergences: float

    @property
    def share(self) -> float:
        """The speed of the divergences relative to the two products."""
        return self.products / self.divergences


def sources(dtype: torch.dtype, width: int, tokens: int, device: str = "cpu") -> tuple[LogitSource, LogitSource]:
    """Return π and μ: the same hidden states, heads that differ by about 1e-3, logits of standard deviation 3."""
    random = torch.Generator(device).manual_seed(width)
    hidden = torch.randn((tokens, width), generator=random, device=device).to(dtype)
    weight = torch.randn((VOCABULARY, width), generator=random, device=device) * 3 / width**0.5
    noise = torch.randn((VOCABULARY, width), generator=random, device=device) * 3e-3 / width**0.5
    return LogitSource(hidden, (weight + noise).to(dtype)), LogitSource(hidden, weight.to(dtype))


def interleaved(
    first: Callable[[], object], second: Callable[[], object], finish: Callable[[], None], repetitions: int
) -> Speed:
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 1):
        for taken, work in zip(seconds, (first, second), strict=True):
            start = time.perf_counter()
            work()
            finish()
            if repetition:
                taken.append(time.perf_counter() - start)
    return Speed(*(statistics.median(taken) for taken in seconds))


def speed_of(
    target: LogitSource,
    behaviour: LogitSource,
    finish: Callable[[], None] = lambda: None,
    repetitions: int = REPETITIONS,
) -> Speed:
    def products() -> None:
        for source in (target, behaviour):
            torch.matmul(source.hidden, source.weight.T)

    return interleaved(products, lambda: exact_divergences(target, behaviour), finish, repetitions)


def memory_beyond_inputs(target: LogitSource, behaviour: LogitSource) -> float:
    """Return by how much the process grows at most while the divergences are computed, in MiB."""
    process = psutil.Process()
    before, peak, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    exact_divergences(target, behaviour)
    done.set()
    watcher.join()
    return (peak - before) / 2**20


def largest_relative_error(target: LogitSource, behaviour: LogitSource) -> float:
    """Return the largest relative error of all divergences at the first states, against 80-bit numbers."""
    found = exact_divergences(*(first_states(source) for source in (target, behaviour)))
    log_pi, log_mu = (log_softmax(first_states(source)) for source in (target, behaviour))
    pi, mu = np.exp(log_pi), np.exp(log_mu)
    expected = {
        "kl": mu * (log_mu - log_pi),
        "reverse_kl": pi * (log_pi - log_mu),
        "tv": np.abs(pi - mu) / 2,
        "chi2": (pi - mu) ** 2 / mu,
        "reverse_chi2": (pi - mu) ** 2 / pi,
        "target_entropy": -pi * log_pi,
        "behaviour_entropy": -mu * log_mu,
    }
    return max(
        float(np.max(np.abs(getattr(found, name) / terms.sum(axis=1) - 1.0))) for name, terms in expected.items()
    )


def memory_beyond_inputs_on_gpu(target: LogitSource, behaviour: LogitSource) -> float:
    """Return the peak of GPU memory allocated while the divergences are computed, in MiB."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    exact_divergences(target, behaviour)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def first_states(source: LogitSource) -> LogitSource:
    return LogitSource(source.hidden[:CHECKED_TOKENS], source.weight)


def log_softmax(source: LogitSource) -> NDArray[np.longdouble]:
    logits = torch.empty((source.tokens, VOCABULARY), dtype=source.held_in)
    rows = source.rows(0, source.tokens)
    # In the blocks of `exact_divergences`, because a product that is split differently rounds differently.
    whole = source.device.type == "cuda" or source.writes_directly(source.held_in)
    block = VOCABULARY if whole else VOCABULARY_BLOCK
    for start in range(0, VOCABULARY, block):
        stop = min(start + block, VOCABULARY)
        source.write_logits(rows, start, stop, logits[:, start:stop])
    exact: NDArray[np.longdouble] = logits.double().numpy().astype(np.longdouble)
    exact -= exact.max(axis=1, keepdims=True)
    normalised: NDArray[np.longdouble] = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return normalised


def row(device: str, dtype: torch.dtype, width: int, tokens: int, speed: Speed, error: str) -> str:
    name = str(dtype).removeprefix("torch.")
    times = f"{speed.products * 1e3:12.1f} {speed.divergences * 1e3:14.1f} {speed.share:8.2f}"
    return f"{device:11s} {name:9s} {width:6d} {tokens:7d} {times} {error:>10s}"


def on_cpu(instructions: str) -> dict[str, float]:
    """Print a row per shape; return the lowest speed, the largest error, and the memory and its growth with tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        exact_divergences(*sources(dtype, 16, 1))  # compile and start the threads
    few, many = (memory_beyond_inputs(*sources(torch.float32, 256, tokens)) for tokens in (256, 2048))
    halves = memory_beyond_inputs(*sources(torch.bfloat16, 256, 2048))
    shares, errors = [], []
    for dtype, width, tokens in CPU_SHAPES:
        pair = sources(dtype, width, tokens)
        speed, error = speed_of(*pair), largest_relative_error(*pair)
        print(row(instructions, dtype, width, tokens, speed, f"{error:.1e}"), flush=True)
        shares.append(speed.share)
        errors.append(error)
    whole = 2 * 4 * VOCABULARY * 2048 / 2**20
    print(
        f"memory beyond the inputs: {few:.0f} MiB for 256 tokens, {many:.0f} MiB for 2048, whose logits are "
        f"{whole:.0f}; {halves:.0f} MiB for 2048 in bfloat16",
        flush=True,
    )
    return {"cpu_speed": min(shares), "error": max(errors), "memory_mib": many, "memory_growth": many / few}


def on_cpu_held_to(instructions: InstructionSet) -> None:
    """Print the rows of a process held to a lower instruction set, for comparison; no bar applies."""
    variables = EngineEnvironment(instructions).variables() | NUMBA_VARIABLES.get(instructions, {})
    command = [sys.executable, "-m", "benchmarks.exact_divergence", "--rows", instructions.value]
    subprocess.run(command, env=os.environ | variables, check=True)


def on_gpu() -> float:
    """Print a row and the memory per shape; return the lowest speed relative to the two products."""
    print(torch.cuda.get_device_name())
    shares = []
    for dtype, width, tokens in GPU_SHAPES:
        pair = sources(dtype, width, tokens, "cuda")
        speed = speed_of(*pair, torch.cuda.synchronize, GPU_REPETITIONS)
        error = f"{largest_relative_error(*pair):.1e}"
        print(row("cuda", dtype, width, tokens, speed, error), flush=True)
        print(f"memory beyond the inputs: {memory_beyond_inputs_on_gpu(*pair):.0f} MiB")
        shares.append(speed.share)
    return min(shares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="NAME", help="print only the rows of the CPU, under NAME")
    arguments = parser.parse_args()
    if arguments.rows is not None:
        on_cpu(arguments.rows)
        return 0
    sets = available_instruction_sets()
    own = sets[-1].value if sets else NO_SET
    print(f"vocabulary {VOCABULARY}, {torch.get_num_threads()} threads, the processor's own instruction set: {own}")
    header = f"{'processor':11s} {'dtype':9s} {'width':>6s} {'tokens':>7s} {'products ms':>12s} {'divergences ms':>14s}"
    print(f"{header} {'speed':>8s} {'rel error':>10s}", flush=True)
    figures = on_cpu(own)
    for lower in reversed(sets[:-1]):
        on_cpu_held_to(lower)
    reached = figures["cpu_speed"] >= BAR_SPEED and figures["memory_growth"] <= BAR_GROWTH
    gpu = "not available"
    if torch.cuda.is_available():
        share = on_gpu()
        reached = reached and share >= BAR_SPEED
        gpu = f"{share:.2f}"
    else:
        print(gpu)
    print(
        f"cpu_speed={figures['cpu_speed']:.2f} gpu_speed={gpu.replace(' ', '_')} bar={BAR_SPEED} "
        f"largest_relative_error={figures['error']:.1e} memory_mib={figures['memory_mib']:.0f} "
        f"memory_growth={figures['memory_growth']:.2f} reached={str(reached).lower()}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
