"""Update to noise where the truth is known: how far the policy moved, and what became of rewarded answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshock.api.records import parse, to_json
from foreshock.diagnosis.update_noise import LEAST_GROUPS, UpdateToNoise, measure_update
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch
from tests.service.sending import make_batch

GROUPS = 16


def batch_of(groups: int = GROUPS) -> RolloutBatch:
    """Return pairs of rollouts of one prompt each, the first of which is rewarded."""
    return make_batch(2 * groups, reward=np.tile([1.0, 0.0], groups).astype(np.float32))


def measured(
    batch: RolloutBatch, gain: float, noise: float = 1e-3, spread: float = 0.05, seed: int = 7
) -> UpdateToNoise:
    """Return the measurement of an update that adds `gain` nats to each token of rewarded answers."""
    random = np.random.default_rng(seed)
    before = np.full(batch.num_tokens, -3.0, np.float32)
    rewarded = np.repeat(np.asarray(batch.reward) > 0, batch.response_lengths)
    after = before + gain * rewarded + random.normal(0.0, spread, batch.num_tokens)
    again = before + random.normal(0.0, noise, batch.num_tokens)
    return measure_update(
        batch, before, again.astype(np.float32), after.astype(np.float32),
        steps=(4, 5), scorer="torch.trainer", fingerprints=(Fingerprint(engine="torch"), Fingerprint(engine="torch")),
    )  # fmt: skip


def test_ratio_is_the_move_over_the_noise_of_the_scorer() -> None:
    found = measured(batch_of(), gain=0.0)
    assert found.update_k3.mean == pytest.approx(0.05**2 / 2, rel=0.3)
    assert found.floor_k3.mean == pytest.approx(1e-6 / 2, rel=0.3)
    assert found.ratio == pytest.approx(2500, rel=0.4)
    assert found.in_words().startswith("1 update moved the policy by k3 ")


def test_scorer_without_noise_has_no_floor() -> None:
    found = measured(batch_of(), gain=0.0, noise=0.0)
    assert found.ratio == math.inf
    assert "without any noise" in found.in_words()


@pytest.mark.parametrize(("gain", "verdict"), [(0.1, "became likelier"), (-0.1, "lost likelihood")])
def test_rewarded_answers_gain_or_lose_likelihood(gain: float, verdict: str) -> None:
    found = measured(batch_of(), gain)
    assert verdict in found.in_words()
    assert found.rewarded == found.rewarded_groups == GROUPS
    assert found.rewarded_change.mean == pytest.approx(gain, abs=0.03)
    assert found.others_change.mean == pytest.approx(0.0, abs=0.03)


def test_likelihood_that_did_not_change_is_said_to_in_few_draws() -> None:
    batch = batch_of()
    said = [measured(batch, gain=0.0, seed=seed).in_words() for seed in range(20)]
    # The interval is nominally 95 %: 1 of 20 is expected.
    assert sum("did not clearly change" not in each for each in said) <= 4


def test_few_prompts_with_different_rewards_say_nothing_of_likelihood() -> None:
    said = measured(batch_of(LEAST_GROUPS - 1), gain=0.5).in_words()
    assert f"needs {LEAST_GROUPS} prompts with different rewards" in said
    equal = measured(make_batch(2 * GROUPS, reward=np.ones(2 * GROUPS, np.float32)), gain=0.5)
    assert (equal.rewarded, equal.rewarded_change.mean) == (0, None)
    unrewarded = measured(make_batch(2 * GROUPS, reward=np.full(2 * GROUPS, np.nan, np.float32)), gain=0.0)
    assert (unrewarded.rewarded, unrewarded.others_change.mean) == (0, None)


def test_measurement_round_trips_through_json() -> None:
    found = measured(batch_of(), gain=0.1)
    assert parse(UpdateToNoise, to_json(found)) == found
