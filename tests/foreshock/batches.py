"""Batches of rollouts for tests: random ones with every column, and the recorded runs in ../shared."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.measures import Comparison, compare
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock.rollouts.rollout_files import read_rollout_file, step_of_file
from tests.paths import SHARED_RUNS


def recorded_run(name: str) -> Path:
    """Return the folder of a recorded run's rollouts; skip the test if the recordings are absent."""
    folder = SHARED_RUNS / name / "rollouts"
    if not folder.is_dir():
        pytest.skip("the recorded runs in ../shared/data/tiny_rl are not here")
    return folder


def recorded_steps(folder: Path) -> Iterator[tuple[int, RolloutBatch]]:
    """Yield (step, rollouts) of the step files in a folder, in the order of the steps."""
    for path in sorted(folder.glob("step_*.jsonl.gz")):
        step = step_of_file(path)
        assert step is not None
        yield step, read_rollout_file(path)


def random_log_probs(
    generator: np.random.Generator, tokens: int, smallest: float = 1e-6, largest: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return log π and log μ [T] whose difference has either sign and a log-uniform size between the two limits."""
    behaviour = -generator.exponential(1.0, tokens)
    size = np.exp(generator.uniform(np.log(smallest), np.log(largest), tokens))
    sign = np.where(generator.random(tokens) < 0.5, -1.0, 1.0)
    target = behaviour + sign * size
    # Log-probs are not positive: if π would be above 0, μ moves down instead.
    above = target > 0
    behaviour[above] -= target[above]
    return np.minimum(target, 0.0).astype(np.float32), behaviour.astype(np.float32)


def random_batch(
    seed: int = 0, rollouts: int = 12, longest: int = 40, smallest: float = 1e-6, largest: float = 1.0
) -> RolloutBatch:
    """Return rollouts with every column, some without a token, a third of their tokens tool output."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, longest, rollouts)
    lengths[0] = longest
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = int(offsets[-1])
    target, behaviour = random_log_probs(generator, tokens, smallest, largest)
    columns: dict[str, Any] = {
        "rollout_log_probs": behaviour,
        "trainer_log_probs": target,
        "response_mask": (generator.random(tokens) > 0.3).astype(np.uint8),
        "entropy": generator.exponential(1.0, tokens).astype(np.float32),
        "turn": np.concatenate([np.sort(generator.integers(0, 3, length)) for length in lengths]).astype(np.int16),
        "weights_version": generator.integers(3, 6, tokens).astype(np.int32),
        "group_ids": [f"prompt-{row // 4}" for row in range(rollouts)],
        "data_sources": ["sums", *[None] * (rollouts - 1)],
        "engine_ids": [f"replica-{row % 2}" for row in range(rollouts)],
        "reward": generator.random(rollouts).astype(np.float32),
        "advantage": generator.normal(size=tokens).astype(np.float32),
        "finish_reasons": ["length" if row % 3 == 0 else "stop" for row in range(rollouts)],
        "temperature": np.full(rollouts, 0.8, np.float32),
        "top_p": np.full(rollouts, 0.9, np.float32),
        "top_k": np.full(rollouts, -1, np.int32),
        "min_p": np.full(rollouts, 0.05, np.float32),
    }
    return RolloutBatch.from_arrays(
        [f"sample-{seed}-{row}" for row in range(rollouts)],
        generator.integers(0, 1000, rollouts * 5),
        np.arange(rollouts + 1) * 5,
        generator.integers(0, 1000, tokens),
        offsets,
        attributes=BatchAttributes(trainer_weights_version=6, length_cap=longest, logprobs_mode="raw_logprobs"),
        **columns,
    )


def compared(batch: RolloutBatch) -> Comparison:
    """Return the comparison trainer/rollout of a batch that has both log-probs."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    return compare(batch, batch.trainer_log_probs, batch.rollout_log_probs)


def assert_equal_fields(one: Any, two: Any) -> None:
    """Assert that all fields of two dataclasses are bit for bit equal, and of one dtype."""
    for item in fields(two):
        left, right = getattr(one, item.name), getattr(two, item.name)
        if isinstance(right, np.ndarray):
            assert left.dtype == right.dtype, item.name
            np.testing.assert_array_equal(left, right, err_msg=item.name)
        else:
            assert left == right, item.name
