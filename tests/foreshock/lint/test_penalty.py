"""A penalty on repeated tokens, of an engine that samples with it; and what else may separate μ from π."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from foreshock.api.steps import LintWarningRecord
from foreshock.lint import lint_batch
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.healthy import log_softmax

VOCABULARY, WIDTH = 48, 12


@dataclass(frozen=True, slots=True)
class Engine:
    """How the engine samples, and what its weights and numerics differ by."""

    repetition: float = 1.0
    presence: float = 0.0
    temperature: float = 1.0
    noise: float = 0.0
    stale: float = 0.0


def sampled(engine: Engine, rollouts: int = 48, longest: int = 80) -> RolloutBatch:
    """Return rollouts of a policy with a memory of its tokens; the trainer has the policy without a penalty."""
    random = np.random.default_rng(3)
    embedding, head = random.normal(0, 1, (VOCABULARY, WIDTH)), random.normal(0, 0.5, (WIDTH, VOCABULARY))
    old = head + engine.stale * random.normal(0, 0.5, head.shape)
    prompts = random.integers(0, VOCABULARY, (rollouts, 8))
    state = embedding[prompts].mean(axis=1) * 2
    occurred = np.zeros((rollouts, VOCABULARY), bool)
    occurred[np.arange(rollouts)[:, None], prompts] = True
    generated = np.zeros_like(occurred)
    ids, mu, pi = (np.zeros((rollouts, longest), kind) for kind in (np.int32, np.float32, np.float32))
    rows = np.arange(rollouts)
    for step in range(longest):
        logits = state @ old + random.normal(0, engine.noise, (rollouts, VOCABULARY))
        penalised = np.where(logits > 0, logits / engine.repetition, logits * engine.repetition)
        logits = np.where(occurred, penalised, logits) - engine.presence * generated
        log_mu, log_pi = log_softmax(logits / engine.temperature), log_softmax(state @ head)
        ids[:, step] = (random.random((rollouts, 1)) > np.cumsum(np.exp(log_mu), axis=1)).sum(1).clip(0, VOCABULARY - 1)
        mu[:, step], pi[:, step] = log_mu[rows, ids[:, step]], log_pi[rows, ids[:, step]]
        occurred[rows, ids[:, step]] = generated[rows, ids[:, step]] = True
        state = 0.6 * state + 0.8 * embedding[ids[:, step]]
    return RolloutBatch.from_lists(
        [f"r{row}" for row in range(rollouts)],
        [list(map(int, each)) for each in prompts],
        [list(map(int, each)) for each in ids],
        rollout_log_probs=mu.tolist(), trainer_log_probs=np.minimum(pi, 0).tolist(),
        group_ids=[f"g{row // 4}" for row in range(rollouts)],
    )  # fmt: skip


def warnings_of(batch: RolloutBatch) -> dict[str, LintWarningRecord]:
    return {each.name: each for each in lint_batch(batch).warnings}


@pytest.mark.parametrize(
    "engine", [Engine(repetition=1.2), Engine(repetition=1.5), Engine(presence=0.5), Engine(presence=1.5)]
)
def test_a_penalty_of_the_engine_is_named(engine: Engine) -> None:
    found = warnings_of(sampled(engine))
    assert found["penalty_of_engine"].seen.startswith("log π − log μ averages 0.")
    assert "at tokens that occurred before" in found["penalty_of_engine"].seen
    assert not found.keys() & {"temperatures_differ", "mismatch_by_place", "mismatch_everywhere"}


@pytest.mark.parametrize(
    "engine",
    [
        Engine(),
        Engine(temperature=0.6),
        Engine(temperature=1.4),
        Engine(noise=0.3),
        Engine(stale=0.3),
        Engine(stale=1.0),
    ],
)
def test_nothing_else_looks_like_a_penalty(engine: Engine) -> None:
    assert "penalty_of_engine" not in warnings_of(sampled(engine))


def test_a_penalty_of_the_trainer_is_not_called_one_of_the_engine() -> None:
    batch = sampled(Engine(repetition=1.2))
    turned = replace(batch, rollout_log_probs=batch.trainer_log_probs, trainer_log_probs=batch.rollout_log_probs)
    assert "penalty_of_engine" not in warnings_of(turned)
