"""Compare the service's measures with a direct evaluation of the formulas. `make bench-exactness`

Rollouts are uploaded over HTTP and every measure is read back over HTTP. Each measure with a formula is compared with a
float64 evaluation of the formula alone (tests/foreshock/measures/direct.py: math.fsum over Python floats; no shared
code).

Bars: a relative error of 1e-12 for every measure, or an absolute error of 1e-18 below 1e-6; the sum of d over
links equals d of the whole, token by token, to 1e-12. Data: random batches with |d| from 1e-6 to 30, including NaN and
infinities, and every step of the recorded run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import httpx
import numpy as np

from benchmarks.bars import Line, report
from benchmarks.recorded_runs import SHIPPED
from benchmarks.running_service import service, wait_until_advanced
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.measures.estimators.attribution import attribute
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.scorers import CHAIN, SCORERS
from tests.foreshock.measures.direct import direct_measures
from tests.service.sending import start_run

BAR_MEASURES = 1e-12
BAR_TELESCOPING = 1e-12
LEAST_MEASURES = 20
SMALLEST = 1e-6
"""Errors of smaller values are divided by this."""


def random_batch(seed: int, scale: float) -> RolloutBatch:
    """Return 64 rollouts whose |d| is around `scale` nats, with a few NaN and infinite log-probs."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 200, 64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Values below −100 do not count as log-probs and are counted separately.
    behaviour = -np.minimum(random.exponential(1.0 + scale, offsets[-1]), 60.0).astype(np.float32)
    target = np.clip(behaviour + random.normal(0, scale, offsets[-1]), -95.0, 0.0).astype(np.float32)
    for position, value in zip(random.integers(0, offsets[-1], 6), (np.nan, -np.inf, np.inf) * 2, strict=True):
        (target if value == value else behaviour)[position] = value
    prompt = np.zeros(64, dtype=np.int32)
    return RolloutBatch(
        sample_ids=[f"{seed}-{i}" for i in range(64)],
        prompt_token_ids=prompt,
        prompt_offsets=np.arange(65, dtype=np.int64),
        response_token_ids=random.integers(0, 1000, offsets[-1]).astype(np.int32),
        response_offsets=offsets,
        rollout_log_probs=behaviour,
        trainer_log_probs=target,
        response_mask=(random.random(offsets[-1]) < 0.95).astype(np.uint8),
    )


def batches() -> Iterator[tuple[str, RolloutBatch]]:
    for seed, scale in enumerate((1e-6, 1e-4, 1e-2, 1.0, 10.0)):
        yield f"random |d|~{scale:g}", random_batch(seed, scale)
    for path in sorted((SHIPPED / "rollouts").glob("*.parquet")):
        yield f"recorded {path.stem}", decode_rollouts(path.read_bytes())


def measured(client: httpx.Client, name: str, batch: RolloutBatch) -> dict[str, float | None]:
    """Upload the batch as a step of its own run, in two shards, and return all its measures."""
    run = start_run(client, name)
    half = batch.num_rollouts // 2
    for shard, rows in enumerate((range(half), range(half, batch.num_rollouts))):
        run.put_shard(1, batch.select(np.array(rows)), shard, shards=2).raise_for_status()
    wait_until_advanced(client, run.run)
    answer = run.get("measurements", comparison=TRAINER_ROLLOUT).raise_for_status()
    return {name: column[0] for name, column in answer.json()["columns"].items()}


def telescoping_error(batch: RolloutBatch, seed: int) -> float:
    """Return the largest |Σ d_link − d| over the tokens of a whole chain, in which random scores are the replays."""
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    random = np.random.default_rng(seed)
    size = batch.num_tokens
    first, *replays, last = CHAIN
    scores = {first: batch.rollout_log_probs, last: batch.trainer_log_probs}
    for name in replays:
        logged = scores[first if SCORERS[name].side == SCORERS[first].side else last]
        scores[name] = (logged + random.normal(0, 0.01, size)).astype(np.float32)
    return float(attribute(scores, batch.response_offsets, batch.response_mask).telescoping_error)


def main() -> int:
    worst: dict[str, tuple[float, str]] = {}
    worst_telescoping, steps = 0.0, 0
    with service() as (_, client):
        for number, (name, batch) in enumerate(batches()):
            answers = measured(client, name, batch)
            for measure, direct in direct_measures(batch).items():
                # Without turns the service has no ESS by turn.
                if measure in answers.keys() - {"ess_turn"} and math.isfinite(direct) and direct:
                    answer = answers[measure]
                    error = math.inf if answer is None else abs(answer - direct) / max(abs(direct), SMALLEST)
                    worst[measure] = max(worst.get(measure, (0.0, "")), (error, name))
            worst_telescoping = max(worst_telescoping, telescoping_error(batch, number))
            steps += 1
    print(f"{'measure':36s} {'largest relative error':>24s}   on")
    for measure, (error, name) in worst.items():
        print(f"{measure:36s} {error:24.2e}   {name}")
    return report(
        [
            Line("measures", "measures compared", len(worst), LEAST_MEASURES, at_least=True),
            Line(
                "largest_relative_error", "largest relative error", max(error for error, _ in worst.values()),
                BAR_MEASURES,
            ),
            Line("telescoping_error", "largest |Σ d_link − d|", worst_telescoping, BAR_TELESCOPING),
        ],
        steps=steps,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
