"""The reduction equals textbook definitions, for any sizes of slices and numbers of threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foreshock_probes.exact_divergence.divergences import exact_divergences
from foreshock_probes.exact_divergence.pairs import target_logits
from foreshock_probes.scorers.forward_pass import FLOAT32_BYTES
from tests.probes.exact_divergence.reference import COMPUTED, by_definition, hard_cases, likeliest

RELATIVE = 1e-11
ABSOLUTE = 1e-14

Found = dict[str, NDArray[np.float64]]


def of_logits(target: torch.Tensor, behaviour: torch.Tensor, ids: torch.Tensor | None = None) -> Found:
    ids = torch.zeros(target.shape[0], dtype=torch.int64) if ids is None else ids
    return {name: found.numpy() for name, found in exact_divergences(target, behaviour, ids).items()}


def assert_same(first: Found, second: Found) -> None:
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 257, 2500])
def test_hard_logits_give_the_defined_values(vocabulary: int) -> None:
    for name, (target, behaviour) in hard_cases(vocabulary).items():
        found = of_logits(target, behaviour)
        expected = by_definition(target, behaviour)
        for divergence in COMPUTED:
            values = found[divergence]
            message = f"{name}: {divergence}"
            np.testing.assert_allclose(values, expected[divergence], rtol=RELATIVE, atol=ABSOLUTE, err_msg=message)
            assert (values >= 0.0).all(), message
        flips = [a != b for a, b in zip(likeliest(target), likeliest(behaviour), strict=True)]
        assert found["top1_flip"].tolist() == flips, name


def test_tiny_mismatch_has_small_relative_errors() -> None:
    plain = torch.randn((4, 3000), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = plain + 3e-5 * torch.randn((4, 3000), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = of_logits(target, plain), by_definition(target, plain)
    assert (found["kl"] < 1e-9).all()
    for divergence in ("kl", "reverse_kl", "tv"):
        np.testing.assert_allclose(found[divergence], expected[divergence], rtol=1e-9)


def test_bfloat16_logits_are_not_rounded_further() -> None:
    for name, pair in hard_cases(1100).items():
        target, behaviour = (logits.bfloat16() for logits in pair)
        found, expected = of_logits(target, behaviour), by_definition(target, behaviour)
        for divergence in COMPUTED:
            values = found[divergence]
            np.testing.assert_allclose(
                values, expected[divergence], rtol=RELATIVE, atol=ABSOLUTE, err_msg=f"{name}: {divergence}"
            )


@pytest.mark.parametrize("apart", [0.9999, -0.9999, 1.0001, -1.0001, 5.0, -5.0, 800.0, -800.0, -np.inf])
def test_divergences_are_exact_with_one_distant_token(apart: float) -> None:
    behaviour = torch.randn((3, 1700), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    target = behaviour + 1e-3 * torch.randn((3, 1700), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for row, token in enumerate((0, 700, 1699)):
        target[row, token] = behaviour[row, token] + apart
    found, expected = of_logits(target, behaviour), by_definition(target, behaviour)
    for divergence in COMPUTED:
        np.testing.assert_allclose(found[divergence], expected[divergence], rtol=RELATIVE, err_msg=divergence)


def test_identical_logits_have_divergences_of_exactly_0() -> None:
    logits = torch.randn((5, 700), generator=torch.Generator().manual_seed(0))
    found = of_logits(logits, logits.clone())
    for divergence in ("kl", "reverse_kl", "tv", "top1_flip"):
        assert found[divergence].tolist() == [0.0] * 5


def test_uncovered_support_gives_infinite_divergence() -> None:
    target = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0], [0.0, -900.0, -torch.inf]])
    behaviour = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf], [0.0, -900.0, -900.0]])
    found = of_logits(target, behaviour)
    # In the third row the probability of μ's third token underflows, but its logit is finite, so it is support.
    assert found["kl"].tolist() == [np.inf, pytest.approx(np.log(1.5)), np.inf]
    assert found["reverse_kl"].tolist() == [pytest.approx(np.log(1.5)), np.inf, 0.0]
    assert found["tv"].tolist() == [pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_invalid_state_is_nan_and_leaves_other_states_unchanged(wrong: float) -> None:
    target, behaviour = hard_cases(300)["ordinary mismatch"]
    expected = of_logits(target[2:], behaviour[2:])
    target, behaviour = target.clone(), behaviour.clone()
    target[0, 299] = wrong
    behaviour[1] = -torch.inf
    found = of_logits(target, behaviour)
    for name in COMPUTED:
        values = found[name]
        assert np.isnan(values[:2]).all()
        assert values[2] == expected[name][0]
    assert not found["top1_flip"][:2].any()


def test_no_tokens_give_empty_arrays() -> None:
    assert all(not values.size for values in of_logits(torch.zeros(0, 9), torch.zeros(0, 9)).values())


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_size_of_slices_changes_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, behaviour = hard_cases(600, rows=9)["ordinary mismatch"]
    whole = of_logits(target, behaviour)
    monkeypatch.setitem(FLOAT32_BYTES, "cpu", 4 * 600 * rows)
    assert_same(of_logits(target, behaviour), whole)


def test_number_of_threads_changes_no_bit() -> None:
    target, behaviour = hard_cases(900, rows=7)["ordinary mismatch"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = of_logits(target, behaviour)
        torch.set_num_threads(3)
        assert_same(of_logits(target, behaviour), alone)
    finally:
        torch.set_num_threads(before)


def test_gradients_inference_mode_and_strides_do_not_change_the_result() -> None:
    target, behaviour = hard_cases(700)["ordinary mismatch"]
    plain = of_logits(target, behaviour)
    assert_same(of_logits(target.clone().requires_grad_(), behaviour.clone().requires_grad_()), plain)
    with torch.inference_mode():
        assert_same(of_logits(target.double().clone(), behaviour.clone()), plain)
    assert_same(of_logits(target.T.contiguous().T, torch.stack([behaviour, behaviour], -1)[..., 0]), plain)


def test_concurrent_calls_return_their_own_results() -> None:
    cases = list(hard_cases(400).values())
    expected = [of_logits(*pair) for pair in cases]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(lambda pair: of_logits(*pair), cases * 3), expected * 3, strict=True):
            assert_same(found, alone)


def test_log_probs_are_those_of_the_given_token_ids() -> None:
    target, behaviour = hard_cases(500)["target masked"]
    ids = torch.tensor([0, 250, int(target[2].isinf().nonzero()[0, 0])])
    found = of_logits(target, behaviour, ids)
    expected = [torch.log_softmax(logits.double(), -1)[torch.arange(3), ids].numpy() for logits in (target, behaviour)]
    assert expected[0][2] == -np.inf
    np.testing.assert_allclose(found["target_log_probs"], expected[0], rtol=1e-12)
    np.testing.assert_allclose(found["behaviour_log_probs"], expected[1], rtol=1e-12)


def made(dtype: torch.dtype, softcap: float = torch.inf, divisor: float = 1.0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn((6, 24), generator=random).to(dtype),
        "weight": (torch.randn((700, 24), generator=random) * 0.5).to(dtype),
        "softcap": torch.tensor(softcap),
        "divisor": torch.tensor(divisor, dtype=torch.float64),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_targets_logits_are_those_of_a_linear_layer(dtype: torch.dtype) -> None:
    target = made(dtype) | {"bias": torch.linspace(-1, 1, 700).to(dtype)}
    expected = torch.nn.functional.linear(target["hidden"], target["weight"], target["bias"])
    assert torch.equal(target_logits(target, torch.arange(6)), expected)
    torch.testing.assert_close(target_logits(target, torch.tensor([4, 2])), expected[[4, 2]])


def test_a_targets_soft_cap_is_rounded_as_in_its_model_and_its_temperature_is_not() -> None:
    plain = torch.nn.functional.linear(*(made(torch.bfloat16)[name] for name in ("hidden", "weight")))
    capped = target_logits(made(torch.bfloat16, softcap=5.0), torch.arange(6))
    assert torch.equal(capped, torch.tanh(plain / 5.0) * 5.0)
    cooler = target_logits(made(torch.bfloat16, softcap=5.0, divisor=0.7), torch.arange(6))
    assert cooler.dtype == torch.float32
    torch.testing.assert_close(cooler, capped.float() / 0.7)
