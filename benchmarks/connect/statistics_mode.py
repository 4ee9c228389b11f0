"""Cost of `Client(mode="statistics")`: CPU seconds and bytes of a step of 3 M tokens, beside full logging.

    python -m benchmarks.connect statistics_mode

The step has 1,024 rollouts of about 3,000 tokens in float32 arrays, 8 per prompt. Measured is the work of the client's
background thread: validate, measure, choose, encode. The CPU is user + system time of the process, the median and the
largest of several steps. Bars: 0.2 s of one core and 1 MB a step.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from benchmarks.bars import Line
from foreshock.client.capture import prepare_token_pass
from foreshock.client.settings import ClientSettings
from foreshock.rollouts import RolloutBatch, encode_rollouts
from foreshock.statistics_shards import FullRollouts, encode_statistics_shard

ROLLOUTS, MEAN_LENGTH, PROMPT_LENGTH = 1_024, 3_000, 200
STEPS = 7
BAR_CPU_SECONDS, BAR_BYTES = 0.2, 1_000_000


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


def run() -> list[Line]:
    """Measure the CPU and the bytes of a step."""
    settings = ClientSettings.resolve("http://127.0.0.1:8765")
    full = FullRollouts(settings.full_rollouts, settings.worst_rollouts, settings.max_step_bytes)
    prepare_token_pass()
    columns, seconds = make_step(), []
    for _ in range(STEPS + 1):
        started = time.process_time()
        body = encode_statistics_shard(RolloutBatch.from_arrays(**columns), seed="run/1/0/1", full=full)  # type: ignore[arg-type]
        seconds.append(time.process_time() - started)
    full_bytes = len(encode_rollouts(RolloutBatch.from_arrays(**columns)))  # type: ignore[arg-type]
    # The first step is left out: it touches memory and imports modules for the first time.
    return [
        Line("statistics_mode_cpu_seconds", "statistics, CPU s a step", median(seconds[1:]), BAR_CPU_SECONDS),
        Line("statistics_mode_cpu_seconds_largest", "… the largest", max(seconds[1:])),
        Line("statistics_mode_bytes", "… bytes a step", len(body), BAR_BYTES),
        Line("full_logging_bytes", "bytes of full logging", full_bytes),
    ]
