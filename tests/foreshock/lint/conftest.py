"""Recorded rollouts of the run that the repository ships."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from foreshock.rollouts import RolloutBatch, decode_rollouts
from tests.paths import RECORDED


@cache
def recorded_step(step: int) -> RolloutBatch:
    """Return a step of the recorded run: 128 rollouts of 8 prompts."""
    return decode_rollouts((RECORDED / "rollouts" / f"step_{step:04d}.parquet").read_bytes())


def recorded_steps(*steps: int) -> RolloutBatch:
    """Return several steps of the recorded run as one batch."""
    attributes = recorded_step(steps[0]).attributes
    return RolloutBatch.concat(dataclasses.replace(recorded_step(step), attributes=attributes) for step in steps)


@pytest.fixture
def step() -> RolloutBatch:
    """A step in the middle of the run, with responses of different lengths and uncertain tokens."""
    return recorded_step(40)


def real_mu(batch: RolloutBatch) -> np.ndarray:
    """Return log μ of a recorded batch, [T]."""
    assert batch.rollout_log_probs is not None
    return batch.rollout_log_probs


def real_pi(batch: RolloutBatch) -> np.ndarray:
    """Return log π of a recorded batch, [T]."""
    assert batch.trainer_log_probs is not None
    return batch.trainer_log_probs
