"""k3 pooled over the newest active steps of a run."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from foreshock.measures import compare
from foreshock.measures.pooling import PooledMean
from foreshock.rollouts import RolloutBatch
from foreshock_service.runs.measurements import pooled_mismatch
from tests.service.sending import make_batch, start_run


def k3_sums(batch: RolloutBatch) -> tuple[float, float]:
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    summaries = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).summaries
    return float(summaries.column("sum_k3").sum()), float(summaries.column("n_tokens").sum())


def pooled(app: FastAPI, run: str) -> PooledMean | None:
    with app.state.context.database.read() as session:
        return pooled_mismatch(session, [run]).get(run)


def test_run_without_a_measured_step_has_none(http: httpx.Client, app: FastAPI) -> None:
    assert pooled(app, start_run(http).run) is None


def test_mean_is_over_the_tokens_of_the_newest_active_steps(http: httpx.Client, app: FastAPI) -> None:
    run = start_run(http)
    batches = {step: make_batch(12, seed=step) for step in range(1, 13)}
    for step, batch in batches.items():
        run.put_shard(step, batch).raise_for_status()

    def mean(first: int, last: int) -> float:
        sums = np.array([k3_sums(batches[step]) for step in range(first, last + 1)])
        return float(sums[:, 0].sum() / sums[:, 1].sum())

    found = pooled(app, run.run)
    assert found is not None
    assert found.mean == pytest.approx(mean(3, 12), rel=1e-9)
    assert found.low < found.mean < found.high
    run.new_attempt("again", resume_step=9)
    after = pooled(app, run.run)
    assert after is not None
    assert after.mean == pytest.approx(mean(1, 8), rel=1e-9)
