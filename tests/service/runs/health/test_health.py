"""The health of a run over HTTP: pooled over the newest active steps, judged with its interval, shown on pages."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from foreshock.measures import compare
from foreshock.rollouts import RolloutBatch
from tests.service.sending import make_batch, start_run


def k3_sums(batch: RolloutBatch) -> tuple[float, float]:
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    summaries = compare(batch, batch.trainer_log_probs, batch.rollout_log_probs).summaries
    return float(summaries.column("sum_k3").sum()), float(summaries.column("n_tokens").sum())


def test_run_without_a_measured_step_is_unknown(http: httpx.Client) -> None:
    run = start_run(http)
    read = run.get("health").json()
    assert (read["verdict"], read["measures"]) == ("unknown", [])
    assert "log both" in read["sentences"][0]


def test_mean_is_pooled_over_the_newest_steps(http: httpx.Client) -> None:
    run = start_run(http)
    batches = {step: make_batch(12, seed=step) for step in range(1, 13)}
    for step, batch in batches.items():
        run.put_shard(step, batch).raise_for_status()
    read = run.get("health").json()
    assert (read["first_step"], read["last_step"], read["steps"]) == (3, 12, 10)
    sums = np.array([k3_sums(batches[step]) for step in range(3, 13)])
    k3 = read["measures"][0]
    assert k3["measure"] == "k3_kl"
    assert k3["mean"] == pytest.approx(sums[:, 0].sum() / sums[:, 1].sum(), rel=1e-9)
    assert k3["low"] < k3["mean"] < k3["high"]
    assert run.get("health", steps=2).json()["first_step"] == 11
    page = http.get(f"/runs/{run.run}").raise_for_status().text
    # The page also says since when.
    assert read["sentences"][0].removeprefix("Warning: ") in page


def test_superseded_steps_take_no_part(http: httpx.Client) -> None:
    run = start_run(http)
    for step in range(1, 6):
        run.put_shard(step, make_batch(12, seed=step)).raise_for_status()
    before = run.get("health").json()
    assert before["last_step"] == 5
    run.new_attempt("again", resume_step=4)
    after = run.get("health").json()
    assert (after["first_step"], after["last_step"]) == (1, 3)


def test_measuring_a_step_again_changes_the_answer(http: httpx.Client) -> None:
    run = start_run(http)
    run.put_shard(1, make_batch(12, seed=1)).raise_for_status()
    first = run.get("health").json()["measures"][0]["mean"]
    run.put_shard(2, make_batch(12, seed=2)).raise_for_status()
    assert run.get("health").json()["measures"][0]["mean"] != first
