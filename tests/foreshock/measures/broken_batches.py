"""Random batches with some invalid tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch


def broken_batch(seed: int, rollouts: int, sizes: tuple[float, float]) -> RolloutBatch:
    """Return a batch with some non-finite log-probs, entropies and advantages, some d = 0, and some empty rollouts."""
    batch = random_batch(seed, rollouts, 60, *sizes)
    generator = np.random.default_rng(seed)
    changed = {}
    for name in ("trainer_log_probs", "rollout_log_probs", "entropy", "advantage"):
        values = getattr(batch, name).copy()
        odd = [math.nan, -math.inf, math.inf]
        values[generator.random(values.size) < 0.05] = odd[generator.integers(3)]
        changed[name] = values
    same = generator.random(batch.num_tokens) < 0.1
    changed["trainer_log_probs"][same] = changed["rollout_log_probs"][same]
    return dataclasses.replace(batch, **changed)
