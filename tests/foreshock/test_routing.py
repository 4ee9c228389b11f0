"""Comparisons of routed experts survive JSON, also with numbers that are missing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foreshock.fingerprint import Fingerprint
from foreshock.measures.routing import RoutingMeasures, measure_routing
from foreshock.probe_kinds import ROUTING
from foreshock.routing import RoutingComparison
from foreshock.scorers import SCORERS


def measures(rollouts: int) -> RoutingMeasures:
    random, tokens = np.random.default_rng(0), 5 * rollouts
    pi, mu = (random.random((tokens, 2, 6)).argsort(axis=2)[:, :, :2] for _ in range(2))
    log_pi, log_mu = (-random.exponential(1.0, tokens) for _ in range(2))
    return measure_routing(pi, mu, log_pi, log_mu, np.arange(rollouts + 1) * 5)


@pytest.mark.parametrize("rollouts", [0, 2, 20])
def test_comparison_survives_json(rollouts: int) -> None:
    of_target, of_behaviour = Fingerprint(engine="torch", dtype="bfloat16"), Fingerprint(engine="vllm")
    made = RoutingComparison("torch.trainer", "vllm.prefill", of_target, of_behaviour, measures(rollouts))
    text = json.dumps(made.to_dict(), allow_nan=False)
    read = RoutingComparison.from_dict(json.loads(text) | {"published_at_us": 3})
    np.testing.assert_equal(read.to_dict(), made.to_dict())
    assert read.target_fingerprint == made.target_fingerprint
    assert np.isnan(read.measures.any_difference.mean) == (rollouts == 0)


def test_scorers_that_record_are_replays_of_the_table() -> None:
    assert all(SCORERS[name].implementation is not None for name in ROUTING.usable_scorers())
    assert set(ROUTING.default_scorers) <= set(ROUTING.usable_scorers())
