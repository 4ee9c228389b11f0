"""k3 pooled over the newest steps of runs when read, and kept in memory until a step changes."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from cachetools import LRUCache
from sqlalchemy.orm import Session

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.json_values import number_or_nan
from foreshock.measures.pooling import PooledMean, pool_over_steps, pool_summaries
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock_service.runs.measurements import MeasuredStep, newest_steps, summaries_of_steps

POOLED_STEPS = 10
"""The newest measured steps that k3 is pooled over: one step has too few prompts."""

_COLUMNS = ("k3_kl", "tokens")
_KEPT_WINDOWS = 512

_Version = tuple[tuple[int, int, int], ...]


_windows: LRUCache[tuple[str, _Version], PooledMean] = LRUCache(_KEPT_WINDOWS)
"""The pooled means of windows by run and version, under `_windows_lock`."""

_windows_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class PooledMeasure:
    """A measure pooled over a window; the ends of its interval are NaN if it has none."""

    mean: float
    low: float = math.nan
    high: float = math.nan


def pooled_mismatch(session: Session, run_ids: Collection[str]) -> dict[str, PooledMeasure]:
    """Return k3 of trainer/rollout pooled over each run's newest steps; at most two queries for any number of runs."""
    windows = newest_steps(session, run_ids, TRAINER_ROLLOUT, _COLUMNS, POOLED_STEPS)
    return {run_id: PooledMeasure(k3.mean, k3.low, k3.high) for run_id, k3 in _pooled(session, windows).items()}


def _pooled(session: Session, windows: dict[str, list[MeasuredStep]]) -> dict[str, PooledMean]:
    versions = {run_id: _version(window) for run_id, window in windows.items()}
    with _windows_lock:
        found = {run_id: _windows.get((run_id, version)) for run_id, version in versions.items()}
    keys = [step.key for run_id, known in found.items() if known is None for step in windows[run_id]]
    summaries = summaries_of_steps(session, keys, TRAINER_ROLLOUT) if keys else {}
    pooled = {}
    for run_id, known in found.items():
        if known is None:
            window = windows[run_id]
            known = _pool(window, [summaries[step.key] for step in window if step.key in summaries])
            with _windows_lock:
                _windows[run_id, versions[run_id]] = known
        pooled[run_id] = known
    return pooled


def _version(window: Sequence[MeasuredStep]) -> _Version:
    return tuple((step.key.attempt, step.key.step, step.computed_at_us) for step in window)


def _pool(window: Sequence[MeasuredStep], summaries: Sequence[bytes]) -> PooledMean:
    """Return the pooled k3 of a window: over prompts if every step has its summaries, else over steps."""
    if len(summaries) == len(window):
        return pool_summaries([RolloutSummaries.from_bytes(each) for each in summaries], ("k3_kl",))["k3_kl"]
    k3, tokens = (np.array([number_or_nan(step.values[name]) for step in window]) for name in ("k3_kl", "tokens"))
    return pool_over_steps(k3, tokens)
