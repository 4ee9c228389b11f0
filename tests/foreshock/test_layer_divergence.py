"""Distances of hidden states, their intervals, and which layer is named first."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from foreshock import layer_divergence
from foreshock.api.records import parse, to_json
from foreshock.api.replays import MeanRecord
from foreshock.fingerprint import Fingerprint
from foreshock.measures.routing import RoutingMeasures, measure_routing
from foreshock.probe_kinds import ROUTING
from foreshock.routing import RoutingComparison
from foreshock.scorers import SCORERS

STATES = arrays.arrays(np.float64, (6, 4), elements=st.floats(-1e3, 1e3).map(lambda value: round(value, 3)))


@given(STATES, STATES, st.floats(0.01, 100.0))
def test_distances_agree_with_their_definition_and_ignore_a_common_scale(
    h: NDArray[np.float64], r: NDArray[np.float64], scale: float
) -> None:
    h[:, 0] += 2000.0
    r[:, 0] += 2000.0
    found = layer_divergence.state_distances(h, r)
    np.testing.assert_allclose(found, np.linalg.norm(h - r, axis=1) / np.linalg.norm(r, axis=1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(layer_divergence.state_distances(scale * h, scale * r), found, rtol=1e-6, atol=1e-12)


def test_equal_zero_and_non_finite_states() -> None:
    h = [[1.0, 2.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]]
    r = [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [np.inf, 1.0]]
    np.testing.assert_array_equal(layer_divergence.state_distances(h, r), [0.0, 0.0, np.inf, 1.0, np.nan, np.nan])


def test_states_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        layer_divergence.state_distances(np.zeros((2, 3)), np.zeros((3, 3)))


@given(st.integers(0, 2**32 - 1))
def test_means_are_over_states_whatever_the_rollouts(seed: int) -> None:
    random = np.random.default_rng(seed)
    values, groups = random.exponential(size=(3, 40)), random.integers(0, 6, 40)
    groups[:6] = range(6)
    for place, distance in enumerate(layer_divergence.distances_of(values, groups)):
        assert distance.relative_l2.mean == pytest.approx(values[place].mean())
        assert distance.relative_l2_p99 == pytest.approx(np.quantile(values[place], 0.99))
        assert 0.0 <= distance.relative_l2.low <= values[place].mean() <= distance.relative_l2.high


def test_non_finite_state_is_left_out_at_all_places() -> None:
    values = np.array([[1.0, 2.0, 3.0], [1.0, np.inf, 5.0]])
    found = layer_divergence.distances_of(values, np.array([0, 0, 1]))
    assert [distance.relative_l2.mean for distance in found] == [2.0, 3.0]


def test_floor_of_one_group_reaches_that_groups_mean() -> None:
    values = np.zeros((1, 60))
    values[0, 17] = 6e-7
    (distance,) = layer_divergence.distances_of(values, np.arange(60) // 10)
    found = distance.relative_l2
    assert found.low == 0.0
    assert found.high == pytest.approx(6e-8)
    assert found.mean == pytest.approx(1e-8)
    (few,) = layer_divergence.distances_of(values[:, :40], np.arange(40) // 10)
    assert np.isnan([few.relative_l2.low, few.relative_l2.high]).all()


def test_no_state_gives_unknown_distances() -> None:
    (distance,) = layer_divergence.distances_of(np.zeros((1, 0)), np.zeros(0, np.int64))
    assert to_json(distance) == {"relative_l2": {"mean": None, "low": None, "high": None}, "relative_l2_p99": None}


def layers_of(*levels: tuple[float, float], groups: int = 8) -> tuple[layer_divergence.ComparedLayer, ...]:
    """Return places whose distance and noise floor have the given levels, with 10 % noise over rollouts."""
    random = np.random.default_rng(3)
    noise = random.uniform(0.9, 1.1, (len(levels), 160))
    pair, floor = (noise * np.array([level[side] for level in levels])[:, None] for side in (0, 1))
    return layer_divergence.compared_layers(pair, floor, floor, np.arange(160) // 10 % groups)


def words_of(layers: tuple[layer_divergence.ComparedLayer, ...], groups: int = 8) -> str:
    return layer_divergence.departure_in_words(layers, "torch.trainer", "torch.float32", groups)


def test_first_layer_above_its_floor_is_named() -> None:
    found = layers_of((0.0, 0.0), (1e-7, 1e-7), (1e-3, 1e-7), (5e-3, 1e-7))
    assert layer_divergence.departure_of(found) == "layers.1"
    assert [layer.departs for layer in found] == [False, False, True, True]
    words = words_of(found)
    assert words.startswith("torch.trainer and torch.float32 depart first at layers.1: ")
    assert "range over the prompts" in words


def test_equal_set_ups_depart_nowhere() -> None:
    found = layers_of((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    assert layer_divergence.departure_of(found) is None
    assert found[0].distance.relative_l2 == MeanRecord(mean=0.0, low=0.0, high=0.0)
    assert words_of(found) == "No layer of torch.trainer and torch.float32 departs beyond its noise floor."


def test_layer_whose_intervals_overlap_is_not_named() -> None:
    # The means differ by less than their intervals are wide.
    found = layers_of((0.0, 0.0), (1.001e-3, 1e-3), (1e-2, 1e-3), (1e-2, 1e-3))
    assert not found[1].departs
    assert layer_divergence.departure_of(found) == "layers.1"


def test_floor_of_either_scorer_counts() -> None:
    layer = layers_of((0.0, 0.0), (1e-3, 1e-7), (1e-3, 1e-7))[1]
    assert layer.departs
    for floors in ((layer.distance, layer.compared_floor), (layer.compared_floor, layer.distance)):
        assert not layer_divergence.compared_layer(layer.name, layer.distance, *floors).departs


def test_too_few_prompt_groups_give_no_claim() -> None:
    found = layers_of((1e-3, 0.0), (1e-3, 0.0), groups=3)
    assert layer_divergence.departure_of(found) is None
    assert "cannot be told: an interval needs 5 prompt groups" in words_of(found, groups=3)


def test_places_run_from_the_embeddings_to_the_head() -> None:
    assert layer_divergence.names_of_places(2) == ("embeddings", "layers.0", "layers.1", "norm")


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
