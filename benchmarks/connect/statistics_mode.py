"""Cost of `Client(mode="statistics")`: CPU seconds and bytes of a step of 3 M tokens, beside full logging.

    python -m benchmarks.connect.statistics_mode

1,024 rollouts of about 3,000 tokens in float32 arrays, 8 per prompt. The CPU is user + system time of the process, so
that other work on the machine counts for little; the median and the largest of several steps are printed. The bars are
0.2 s of one core and 1 MB a step.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from foreshock.client.capture import prepare_token_pass
from foreshock.client.settings import ClientSettings
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock.statistics_shards import FullRollouts, StatisticsShard, encode_statistics_shard

ROLLOUTS = 1_024
MEAN_LENGTH = 3_000
PROMPT_LENGTH = 200
STEPS = 7
LARGEST_CPU_SECONDS = 0.2
LARGEST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of each step, bytes of a step and of the same step in full, and the size of the sample."""

    tokens: int
    cpu_seconds: tuple[float, ...]
    step_bytes: int
    full_logging_bytes: int
    sampled_rollouts: int
    compiled: bool


def make_step(seed: int = 0) -> dict[str, object]:
    """Return columns of a step: half of the tokens nearly certain, ids of a large vocabulary by Zipf's distribution."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.gamma(4.0, MEAN_LENGTH / 4.0, ROLLOUTS).astype(np.int64), 1, 4 * MEAN_LENGTH)
    lengths = lengths * (ROLLOUTS * MEAN_LENGTH) // lengths.sum()
    tokens = int(lengths.sum())
    certain = random.random(tokens) < 0.5
    behaviour = np.where(certain, -random.exponential(1e-3, tokens), -random.exponential(1.0, tokens))
    difference = random.normal(0.0, 0.01, tokens) * np.sqrt(-behaviour)
    return {
        "sample_ids": [f"sample-{row}" for row in range(ROLLOUTS)],
        "prompt_token_ids": random.integers(0, 150_000, ROLLOUTS * PROMPT_LENGTH).astype(np.int32),
        "prompt_offsets": np.arange(ROLLOUTS + 1) * PROMPT_LENGTH,
        "response_token_ids": np.minimum(random.zipf(1.3, tokens), 150_000).astype(np.int32),
        "response_offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "rollout_log_probs": behaviour.astype(np.float32),
        "trainer_log_probs": np.minimum(behaviour + difference, 0.0).astype(np.float32),
        "group_ids": [f"prompt-{row // 8}" for row in range(ROLLOUTS)],
        "reward": random.integers(0, 2, ROLLOUTS).astype(np.float32),
    }


def measure(steps: int = STEPS) -> Cost:
    """Measure what the client's background does for a step: validate, measure, choose, encode."""
    settings = ClientSettings.resolve("http://127.0.0.1:8765")
    full = FullRollouts(settings.full_rollouts, settings.worst_rollouts, settings.max_step_bytes)
    compiled = prepare_token_pass()
    columns = make_step()
    seconds = []
    for _ in range(steps + 1):
        started = time.process_time()
        body = encode_statistics_shard(RolloutBatch.from_arrays(**columns), seed="run/1/0/1", full=full)  # type: ignore[arg-type]
        seconds.append(time.process_time() - started)
    shard = StatisticsShard.from_bytes(body)
    whole = RolloutBatch.from_arrays(**columns)  # type: ignore[arg-type]
    # The first step also touches memory and imports for the first time.
    return Cost(
        tokens=whole.num_tokens,
        cpu_seconds=tuple(seconds[1:]),
        step_bytes=len(body),
        full_logging_bytes=len(encode_rollouts(whole)),
        sampled_rollouts=shard.sampled,
        compiled=compiled,
    )


def run() -> dict[str, float]:
    """Return the figures by name, for `make bench-connect`."""
    cost = measure()
    return {
        "statistics_mode_tokens": cost.tokens,
        "statistics_mode_cpu_seconds": statistics.median(cost.cpu_seconds),
        "statistics_mode_cpu_seconds_largest": max(cost.cpu_seconds),
        "statistics_mode_bytes": cost.step_bytes,
        "full_logging_bytes": cost.full_logging_bytes,
        "statistics_mode_sampled_rollouts": cost.sampled_rollouts,
        "statistics_mode_compiled": float(cost.compiled),
    }


def reached(found: dict[str, float]) -> bool:
    """Return True if CPU and bytes of a step are within the bars."""
    return found["statistics_mode_cpu_seconds"] < LARGEST_CPU_SECONDS and found["statistics_mode_bytes"] < LARGEST_BYTES


def main() -> None:
    """Print the figures and whether the bars are met."""
    found = run()
    for name, value in found.items():
        print(f"{name:40} {value:,.4g}" if value < 1000 else f"{name:40} {value:,.0f}")
    within = reached(found)
    print("within the bars" if within else "beyond the bars of 0.2 s and 1 MB")
    raise SystemExit(0 if within else 1)


if __name__ == "__main__":
    main()
