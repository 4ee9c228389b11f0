"""Three million tokens are measured while a step of training would hardly notice."""

from __future__ import annotations

import time

import numpy as np

from foreshock.measures import attribute, compare
from foreshock.rollouts import RolloutBatch


def test_three_million_tokens_take_well_under_two_seconds() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 6000, 1000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = int(offsets[-1])
    behaviour = -generator.exponential(0.5, tokens).astype(np.float32)
    target = np.minimum(behaviour + generator.normal(0, 0.01, tokens), 0).astype(np.float32)
    batch = RolloutBatch.from_arrays(
        [str(row) for row in range(1000)],
        np.zeros(1000, np.int32),
        np.arange(1001),
        np.zeros(tokens, np.int32),
        offsets,
        group_ids=[str(row // 8) for row in range(1000)],
    )
    begin = time.process_time()
    comparison = compare(batch, target, behaviour)
    comparison.statistics.measures()
    compared = time.process_time()
    attribute({"rollout": behaviour, "vllm.prefill": behaviour, "trainer": target}, offsets, None, batch.group_ids)
    attributed = time.process_time()
    assert comparison.statistics.tokens == tokens > 2_900_000
    assert compared - begin < 2.0
    assert attributed - compared < 4.0
