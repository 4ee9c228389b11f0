"""Comparisons of routed experts survive JSON, also with numbers that are missing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foreshock.api.records import parse, to_json
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
    made = RoutingComparison(
        target="torch.trainer", behaviour="vllm.prefill", target_fingerprint=of_target.to_dict(),
        behaviour_fingerprint=of_behaviour.to_dict(), measures=measures(rollouts),
    )  # fmt: skip
    text = json.dumps(to_json(made), allow_nan=False)
    read = parse(RoutingComparison, json.loads(text) | {"published_at_us": 3})
    np.testing.assert_equal(to_json(read), to_json(made))
    assert np.isnan(read.measures.any_difference.mean) == (rollouts == 0)


def test_scorers_that_record_are_replays_of_the_table() -> None:
    assert all(SCORERS[name].implementation is not None for name in ROUTING.usable_scorers())
    assert set(ROUTING.default_scorers) <= set(ROUTING.usable_scorers())
