"""Measures of routed experts against direct counts, at known routings, and under what must not change them."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.measures.routing import UNKNOWN_EXPERT, RoutingMeasures, measure_routing

LENGTHS = [7, 0, 13, 5, 9, 11, 4, 8, 12, 6]
GROUPS = [f"prompt-{row // 2}" for row in range(len(LENGTHS))]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
TOKENS, LAYERS, EXPERTS, TOP_K = int(OFFSETS[-1]), 3, 6, 2


def random_experts(seed: int, tokens: int = TOKENS, layers: int = LAYERS, top_k: int = TOP_K) -> NDArray[np.int16]:
    order = np.random.default_rng(seed).random((tokens, layers, EXPERTS)).argsort(axis=2)
    return order[:, :, :top_k].astype(np.int16)


def random_log_probs(seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    behaviour = -random.exponential(1.0, TOKENS)
    return (behaviour - np.abs(random.normal(0, 0.1, TOKENS))).astype(np.float32), behaviour.astype(np.float32)


def measured(target: Any, behaviour: Any, seed: int = 1, **named: Any) -> RoutingMeasures:
    return measure_routing(target, behaviour, *random_log_probs(seed), OFFSETS, group_ids=GROUPS, **named)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, EXPERTS))
def test_means_are_counts_of_sets(seed: int, layers: int, top_k: int) -> None:
    target, behaviour = (random_experts(seed + side, layers=layers, top_k=top_k) for side in (0, 1))
    found = measured(target, behaviour)
    common = [
        [len({*target[token, layer]} & {*behaviour[token, layer]}) for layer in range(layers)]
        for token in range(TOKENS)
    ]
    agrees = np.array(common) == top_k
    for layer, of_layer in enumerate(found.layers):
        assert of_layer.layer == layer
        assert of_layer.agreement.mean == pytest.approx(agrees[:, layer].mean())
        assert of_layer.overlap.mean == pytest.approx(np.mean([row[layer] for row in common]) / top_k)
        before = agrees[:, :layer].all(axis=1)
        assert of_layer.first_differences.mean == pytest.approx((before & ~agrees[:, layer]).mean())
    differs = ~agrees.all(axis=1)
    assert found.any_difference.mean == pytest.approx(differs.mean())
    assert sum(each.first_differences.mean for each in found.layers) == pytest.approx(found.any_difference.mean)
    pi, mu = random_log_probs(1)
    d = pi.astype(np.float64) - mu
    k3 = np.expm1(d) - d
    for part, chosen in ((found.agreeing, ~differs), (found.differing, differs), (found.all_tokens, d < 9)):
        assert part.tokens == np.count_nonzero(chosen)
        if part.tokens:
            assert part.k3_kl.mean == pytest.approx(k3[chosen].mean(), rel=1e-9)
            assert part.abs_d.mean == pytest.approx(np.abs(d)[chosen].mean(), rel=1e-9)
    assert found.k3_share.mean == pytest.approx(k3[differs].sum() / k3.sum(), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_order_of_experts_and_their_names_do_not_matter(seed: int) -> None:
    target, behaviour = random_experts(seed), random_experts(seed + 1)
    random = np.random.default_rng(seed)
    names = random.permutation(EXPERTS)
    shuffled = random.permuted(behaviour, axis=2)
    # Bounds may be NaN, which assert_equal takes as equal.
    np.testing.assert_equal(asdict(measured(names[target], names[shuffled])), asdict(measured(target, behaviour)))


def test_equal_routes_agree_everywhere() -> None:
    experts = random_experts(4)
    found = measured(experts, experts[:, :, ::-1])
    for of_layer in found.layers:
        assert (of_layer.agreement.mean, of_layer.agreement.low, of_layer.agreement.high) == (1.0, 1.0, 1.0)
        assert (of_layer.overlap.mean, of_layer.first_differences.mean) == (1.0, 0.0)
    assert (found.any_difference.mean, found.any_difference.high, found.k3_share.mean) == (0.0, 0.0, 0.0)
    assert (found.agreeing, found.differing.tokens) == (found.all_tokens, 0)
    assert np.isnan([found.differing.k3_kl.mean, found.differing.abs_d.mean]).all()
    assert (found.groups, found.excluded, found.top_k) == (5, 0, TOP_K)


def test_only_tokens_that_differ_carry_the_mismatch() -> None:
    target = random_experts(4)
    behaviour, (_, mu) = target.copy(), random_log_probs(2)
    rows = np.arange(0, TOKENS, 5)
    behaviour[rows, 1] = (behaviour[rows, 1] + 1) % EXPERTS
    pi = mu.copy()
    pi[rows] -= 0.25
    found = measure_routing(target, behaviour, pi, mu, OFFSETS, group_ids=GROUPS, layers=[4, 8, 9])
    assert [each.layer for each in found.layers] == [4, 8, 9]
    assert [each.agreement.mean for each in found.layers] == [1.0, pytest.approx(1 - rows.size / TOKENS), 1.0]
    assert found.layers[1].agreement.low <= found.layers[1].agreement.mean <= found.layers[1].agreement.high <= 1.0
    assert (found.agreeing.k3_kl.mean, found.k3_share.mean, found.k3_share.high) == (0.0, 1.0, 1.0)
    assert found.differing.abs_d.mean == pytest.approx(0.25, rel=1e-5)
    assert (found.differing.tokens, found.agreeing.tokens) == (rows.size, TOKENS - rows.size)


def test_tool_output_and_tokens_without_a_state_are_excluded() -> None:
    target, behaviour = random_experts(4), random_experts(5)
    pi, mu = random_log_probs(1)
    target[0] = UNKNOWN_EXPERT
    pi[3] = np.nan
    mask = np.ones(TOKENS, np.int8)
    mask[[5, 6]] = 0
    rest = np.setdiff1d(np.arange(TOKENS), [0, 3, 5, 6])
    found = measure_routing(target, behaviour, pi, mu, OFFSETS, mask, GROUPS)
    differs = (np.sort(target, axis=2) != np.sort(behaviour, axis=2)).any(axis=(1, 2))[rest]
    assert (found.all_tokens.tokens, found.excluded) == (rest.size, 2)
    assert found.any_difference.mean == pytest.approx(differs.mean())


def test_no_tokens_give_no_numbers() -> None:
    found = measured(random_experts(1), random_experts(2), mask=np.zeros(TOKENS))
    assert np.isnan([found.any_difference.mean, found.layers[0].agreement.mean, found.k3_share.mean]).all()
    assert (found.all_tokens.tokens, found.groups) == (0, 0)


@pytest.mark.parametrize(
    ("target", "behaviour", "message"),
    [
        (random_experts(1)[:5], random_experts(2), r"target_experts.*\[75 tokens"),
        (random_experts(1), random_experts(2, top_k=3), "another number of experts"),
        (np.zeros((TOKENS, 1, 2), np.int16), np.zeros((TOKENS, 1, 2), np.int16), "distinct experts"),
        (random_experts(1).astype(np.float32), random_experts(2), "integers"),
    ],
)
def test_routes_that_do_not_fit_are_refused(target: Any, behaviour: Any, message: str) -> None:
    with pytest.raises(InvalidRolloutsError, match=message):
        measured(target, behaviour)
