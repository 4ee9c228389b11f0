"""The health of runs: pooled over their newest steps when read, and kept in memory until a step changes."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Collection, Sequence
from typing import Annotated

import numpy as np
from cachetools import LRUCache
from fastapi import APIRouter, Query
from sqlalchemy.orm import Session

from foreshock.api.records import from_attributes
from foreshock.api.runs import HealthRecord, PooledRecord
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.health import JUDGED_MEASURES, WINDOW_STEPS, HealthEvidence, PooledMeasure, conclude_health
from foreshock.interval_names import interval_name
from foreshock.json_values import number_or_nan
from foreshock.measures.estimators.reliability import interval_warning
from foreshock.measures.pooling import CLUSTERED_BY_PROMPT, PooledMean, pool_over_steps, pool_summaries
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.model_kind import ModelKind
from foreshock_service.platform.context import Context
from foreshock_service.platform.security import Principal, Reader
from foreshock_service.runs.lint.service import read_run as read_lint
from foreshock_service.runs.measurements import MeasuredStep, newest_steps, summaries_of_steps
from foreshock_service.runs.run_endpoints import RunIdentifier
from foreshock_service.runs.runs import get_run

_COLUMNS = (*JUDGED_MEASURES, "tokens", "pareto_k", "pareto_k_inverse")
_OVER_PROMPTS = tuple(name for name in JUDGED_MEASURES if name in CLUSTERED_BY_PROMPT)
_KEPT_WINDOWS = 512
_NOTHING = "No step has both rollout_log_probs and trainer_log_probs: log both to see the mismatch."

_Version = tuple[tuple[int, int, int], ...]


_windows: LRUCache[tuple[str, _Version], dict[str, PooledMean]] = LRUCache(_KEPT_WINDOWS)
"""The pooled means of windows by run and version, under `_windows_lock`."""

_windows_lock = threading.Lock()


def health_evidence(
    session: Session, principal: Principal, run_id: str, model_kind: ModelKind | None, steps: int = WINDOW_STEPS
) -> HealthEvidence | None:
    """Return the evidence of a run's newest measured steps; None before the first. Raises RunNotFound, RunDeleted.

    `model_kind` None takes the run's.
    """
    run = get_run(session, principal, run_id)
    window = newest_steps(session, [run_id], TRAINER_ROLLOUT, _COLUMNS, steps).get(run_id)
    if not window:
        return None
    pooled = _pooled(session, {run_id: window})[run_id]
    unreliable = _unreliable(window, pooled["k3_kl"])
    first, last = window[0].key.step, window[-1].key.step
    lint = read_lint(session, principal, run_id, None)
    faults = [warning.title for warning in lint.warnings if warning.newest_step >= first]
    faults += [warning.title for warning in lint.window]
    faults += [lint.whole_run.title] if lint.whole_run is not None else []
    return HealthEvidence(
        first_step=first,
        last_step=last,
        steps=len(window),
        tokens=int(sum(number_or_nan(step.values["tokens"]) for step in window)),
        clusters=pooled["k3_kl"].clusters,
        measures=tuple(
            PooledMeasure(
                name,
                pooled[name].mean,
                pooled[name].low,
                pooled[name].high,
                reliable=pooled[name].by_prompt and unreliable is None,
            )
            for name in JUDGED_MEASURES
        ),
        model_kind=model_kind or run.model_kind,
        unreliable=unreliable,
        faults=tuple(faults),
    )


def pooled_mismatch(session: Session, run_ids: Collection[str]) -> dict[str, PooledMeasure]:
    """Return k3 of trainer/rollout pooled over each run's newest steps; at most two queries for any number of runs."""
    windows = newest_steps(session, run_ids, TRAINER_ROLLOUT, _COLUMNS, WINDOW_STEPS)
    found = {}
    for run_id, pooled in _pooled(session, windows).items():
        k3 = pooled["k3_kl"]
        reliable = k3.by_prompt and _unreliable(windows[run_id], k3) is None
        found[run_id] = PooledMeasure("k3_kl", k3.mean, k3.low, k3.high, reliable)
    return found


def _pooled(session: Session, windows: dict[str, list[MeasuredStep]]) -> dict[str, dict[str, PooledMean]]:
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


def _pool(window: Sequence[MeasuredStep], summaries: Sequence[bytes]) -> dict[str, PooledMean]:
    """Return the pooled means of a window: over prompts if every step has its summaries, else over steps."""
    tokens = np.array([number_or_nan(step.values["tokens"]) for step in window])
    pooled = {
        name: pool_over_steps(np.array([number_or_nan(step.values[name]) for step in window]), tokens)
        for name in JUDGED_MEASURES
    }
    if len(summaries) == len(window):
        pooled |= pool_summaries([RolloutSummaries.from_bytes(each) for each in summaries], _OVER_PROMPTS)
    return pooled


def _unreliable(window: Sequence[MeasuredStep], pooled: PooledMean) -> str | None:
    shapes = {
        name: statistics.median(known) if (known := [v for step in window if (v := step.values[name]) is not None])
        else None
        for name in ("pareto_k", "pareto_k_inverse")
    }  # fmt: skip
    return interval_warning({"prompt_groups": float(pooled.clusters), **shapes})


router = APIRouter(prefix="/v1/runs/{run}", tags=["health"])


@router.get("/health")
def read_health(
    run: RunIdentifier,
    context: Context,
    principal: Reader,
    steps: Annotated[int, Query(ge=1, le=100, description="the newest measured steps to pool")] = WINDOW_STEPS,
    model_kind: Annotated[ModelKind | None, Query(description="judge as this kind; absent: the run's")] = None,
) -> HealthRecord:
    """Return the mismatch pooled over the newest measured steps, its interval over prompts × steps, and the verdict."""
    with context.database.read() as session:
        evidence = health_evidence(session, principal, run, model_kind, steps)
    return HealthRecord(sentences=(_NOTHING,)) if evidence is None else _record(evidence)


def _record(evidence: HealthEvidence) -> HealthRecord:
    """Return the verdict on the evidence, and what it is about."""
    health = conclude_health(evidence)
    return HealthRecord(
        verdict=health.verdict,
        sentences=health.sentences,
        first_step=evidence.first_step,
        last_step=evidence.last_step,
        steps=evidence.steps,
        tokens=evidence.tokens,
        clusters=evidence.clusters,
        measures=tuple(
            from_attributes(
                PooledRecord, each.pooled, interval=interval_name(each.pooled.reliable), verdict=each.verdict
            )
            for each in health.measures
        ),
    )
