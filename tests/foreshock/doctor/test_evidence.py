"""How much a token counts: by what rounding does to it, whatever a few replays happened to give."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.doctor.changes import Change, hashable, json_value
from foreshock.doctor.evidence import Compared, Float64, steadiness
from tests.foreshock.doctor.fake import rollouts


def _compared(logged: Float64) -> Compared:
    batch = rollouts()
    return replace(Compared.of(batch, np.zeros(batch.num_tokens, np.float32)), logged=logged)


def _replays(probabilities: Float64, noise: float = 0.02) -> list[Float64]:
    """Return log-probs of three replays whose logits have noise: it moves a token of probability p by 1 − p as much."""
    random = np.random.default_rng(3)
    plain = np.log(probabilities)
    return [plain + noise * (1 - probabilities) * random.normal(size=plain.size) for _ in range(3)]


def _probabilities() -> Float64:
    certain = np.arange(rollouts().num_tokens) % 8 != 0
    return np.where(certain, 0.999, 0.4)


def test_a_token_at_which_replays_agree_by_chance_counts_as_others_of_its_probability() -> None:
    probabilities = _probabilities()
    replays = _replays(probabilities)
    agreed = int(np.flatnonzero(probabilities == 0.4)[0])
    for each in replays:
        each[agreed] = replays[0][agreed]
    weights = steadiness(replays, _compared(np.log(probabilities)))
    assert weights[agreed] <= 2 * np.median(weights[probabilities == 0.4])
    assert weights[agreed] < 0.1 * np.median(weights[probabilities == 0.999])


def test_a_token_that_the_log_is_uncertain_of_counts_as_an_uncertain_one() -> None:
    probabilities = _probabilities()
    logged = np.log(probabilities)
    other = int(np.flatnonzero(probabilities == 0.999)[0])
    logged[other] = np.log(0.4)
    weights = steadiness(_replays(probabilities), _compared(logged))
    assert weights[other] < 0.1 * np.median(weights[probabilities == 0.999])


def test_a_token_that_rounding_moves_far_counts_less_than_others_of_its_probability() -> None:
    probabilities = _probabilities()
    replays = _replays(probabilities)
    moved = int(np.flatnonzero(probabilities == 0.999)[0])
    replays[1][moved] -= 1.0
    weights = steadiness(replays, _compared(np.log(probabilities)))
    assert weights[moved] < 1e-3 * np.median(weights[probabilities == 0.999])


@settings(max_examples=25)
@given(st.floats(1e-6, 1 - 1e-9), st.floats(0, 10), st.floats(-50, 5))
def test_weights_are_shares_whatever_is_logged(probability: float, noise: float, logged: float) -> None:
    size = rollouts().num_tokens
    compared = _compared(np.full(size, logged))
    weights = steadiness(_replays(np.full(size, probability), noise), compared)
    assert np.all((weights > 0) & (weights <= 1))


def test_without_a_usable_token_all_count_alike() -> None:
    size = rollouts().num_tokens
    compared = _compared(np.full(size, -1.0))
    unusable = replace(compared, usable=np.zeros(size, np.bool_))
    assert np.all(steadiness(_replays(np.full(size, 0.5)), unusable) == 1)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=9
)


@settings(max_examples=40)
@given(value=values)
def test_value_of_a_configuration_comes_back_from_a_change(value: object) -> None:
    change = Change.of(weights="step_10", config=("field", hashable(value)))
    assert {change: 1}[Change.of(config=("field", hashable(value)), weights="step_10")] == 1
    assert json_value(change.get("config")[1]) == value


def test_order_of_a_dictionary_has_no_meaning() -> None:
    first, second = {"theta": 1e4, "kind": ["a", "b"]}, {"kind": ["a", "b"], "theta": 1e4}
    assert hash(hashable(first)) == hash(hashable(second))
    assert hashable(first) == hashable(second)
