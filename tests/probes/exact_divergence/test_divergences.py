"""The reduction equals textbook definitions, for any sizes of chunks and numbers of threads."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from foreshock_probes.exact_divergence import ExactDivergences, GivenLogits, LogitSource, SourceError, exact_divergences
from tests.probes.exact_divergence.reference import DIVERGENCES, by_definition, hard_cases, likeliest

RELATIVE = 1e-11
ABSOLUTE = 1e-14


def of_logits(target: torch.Tensor, behaviour: torch.Tensor, **options: int) -> ExactDivergences:
    return exact_divergences(GivenLogits(target), GivenLogits(behaviour), **options)


def assert_same(first: ExactDivergences, second: ExactDivergences) -> None:
    for field in dataclasses.fields(ExactDivergences):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name), err_msg=field.name)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 257, 2500])
def test_hard_logits_give_the_defined_values(vocabulary: int) -> None:
    for name, (target, behaviour) in hard_cases(vocabulary).items():
        found = of_logits(target, behaviour)
        expected = by_definition(target, behaviour)
        for divergence in DIVERGENCES:
            values = getattr(found, divergence)
            message = f"{name}: {divergence}"
            np.testing.assert_allclose(values, expected[divergence], rtol=RELATIVE, atol=ABSOLUTE, err_msg=message)
            assert (values >= 0.0).all(), message
        flips = [a != b for a, b in zip(likeliest(target), likeliest(behaviour), strict=True)]
        assert found.top1_flip.tolist() == flips, name


def test_tiny_mismatch_has_small_relative_errors() -> None:
    plain = torch.randn((4, 3000), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = plain + 3e-5 * torch.randn((4, 3000), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = of_logits(target, plain), by_definition(target, plain)
    assert (found.kl < 1e-9).all()
    for divergence in ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2"):
        np.testing.assert_allclose(getattr(found, divergence), expected[divergence], rtol=1e-9)


def test_bfloat16_logits_are_not_rounded_further() -> None:
    for name, pair in hard_cases(1100).items():
        target, behaviour = (logits.bfloat16() for logits in pair)
        found, expected = of_logits(target, behaviour), by_definition(target, behaviour)
        for divergence in DIVERGENCES:
            values = getattr(found, divergence)
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
    for divergence in DIVERGENCES:
        np.testing.assert_allclose(getattr(found, divergence), expected[divergence], rtol=RELATIVE, err_msg=divergence)


def test_identical_sources_have_divergences_of_exactly_0() -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn((5, 16), generator=random), torch.randn((700, 16), generator=random)
    found = exact_divergences(LogitSource(hidden, weight), LogitSource(hidden.clone(), weight.clone()))
    for divergence in ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2"):
        assert getattr(found, divergence).tolist() == [0.0] * 5
    assert not found.top1_flip.any()


def test_uncovered_support_gives_infinite_divergence() -> None:
    target = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0], [0.0, -900.0, -torch.inf]])
    behaviour = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf], [0.0, -900.0, -900.0]])
    found = of_logits(target, behaviour)
    # In the third row the probability of μ's third token underflows, but its logit is finite, so it is support.
    assert found.kl.tolist() == [np.inf, pytest.approx(np.log(1.5)), np.inf]
    assert found.reverse_kl.tolist() == [pytest.approx(np.log(1.5)), np.inf, 0.0]
    assert found.chi2.tolist() == [pytest.approx(0.5), np.inf, 0.0]
    assert found.reverse_chi2.tolist() == [np.inf, pytest.approx(0.5), np.inf]
    assert found.tv.tolist() == [pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0]
    assert found.mean_ratio.tolist() == [1.0, pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_invalid_state_is_nan_and_leaves_other_states_unchanged(wrong: float) -> None:
    target, behaviour = hard_cases(300)["ordinary mismatch"]
    expected = of_logits(target[2:], behaviour[2:])
    target, behaviour = target.clone(), behaviour.clone()
    target[0, 299] = wrong
    behaviour[1] = -torch.inf
    found = of_logits(target, behaviour)
    for name in DIVERGENCES:
        values = getattr(found, name)
        assert np.isnan(values[:2]).all()
        assert values[2] == getattr(expected, name)[0]
    assert not found.top1_flip[:2].any()
    assert found.delta_max == expected.tv[0]


def test_no_tokens_give_empty_arrays() -> None:
    none = LogitSource(torch.zeros(0, 4), torch.zeros(9, 4))
    found = exact_divergences(none, none, token_ids=[])
    assert found.tokens == 0
    assert np.isnan(found.delta_max)


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_size_of_chunks_changes_no_bit(chunk: int) -> None:
    target, behaviour = hard_cases(600, rows=9)["ordinary mismatch"]
    assert_same(of_logits(target, behaviour, chunk=chunk), of_logits(target, behaviour))


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
    random = torch.Generator().manual_seed(0)
    hidden, weight, other = (torch.randn(shape, generator=random) for shape in ((5, 16), (700, 16), (700, 16)))
    plain = exact_divergences(LogitSource(hidden, weight), LogitSource(hidden, other))
    trained = [tensor.clone().requires_grad_() for tensor in (hidden, weight, other)]
    assert_same(exact_divergences(LogitSource(trained[0], trained[1]), LogitSource(trained[0], trained[2])), plain)
    columns = hidden.T.contiguous().T, torch.stack([weight, weight], -1)[..., 0]
    with torch.inference_mode():
        inferred = exact_divergences(LogitSource(hidden, weight), LogitSource(hidden, other))
        apart = exact_divergences(LogitSource(*columns), LogitSource(hidden, other))
    assert_same(inferred, plain)
    np.testing.assert_allclose(apart.kl, plain.kl, rtol=1e-4)


def test_concurrent_calls_return_their_own_results() -> None:
    cases = list(hard_cases(400).values())
    expected = [of_logits(*pair) for pair in cases]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(lambda pair: of_logits(*pair), cases * 3), expected * 3, strict=True):
            assert_same(found, alone)


def test_log_probs_are_those_of_the_given_token_ids() -> None:
    target, behaviour = hard_cases(500)["target masked"]
    ids = np.array([0, 250, int(target[2].isinf().nonzero()[0, 0])])
    found = exact_divergences(GivenLogits(target), GivenLogits(behaviour), token_ids=ids, chunk=2)
    at = torch.arange(3), torch.from_numpy(ids)
    expected = [torch.log_softmax(logits.double(), -1)[at].numpy() for logits in (target, behaviour)]
    assert expected[0][2] == -np.inf
    assert found.target_log_probs is not None
    assert found.behaviour_log_probs is not None
    np.testing.assert_allclose(found.target_log_probs, expected[0], rtol=1e-12)
    np.testing.assert_allclose(found.behaviour_log_probs, expected[1], rtol=1e-12)


def test_invalid_arguments_raise_source_error() -> None:
    source = LogitSource(torch.zeros(3, 4), torch.zeros(9, 4))
    with pytest.raises(SourceError, match=r"\[3, 9\] and \[2, 9\]"):
        exact_divergences(source, LogitSource(torch.zeros(2, 4), torch.zeros(9, 4)))
    with pytest.raises(SourceError, match="same tokens and vocabulary"):
        exact_divergences(source, LogitSource(torch.zeros(3, 4), torch.zeros(8, 4)))
    with pytest.raises(SourceError, match=r"token_ids\[2\] must satisfy 0 <= id < 9, got 9"):
        exact_divergences(source, source, token_ids=[0, 1, 9])
    with pytest.raises(SourceError, match=r"3 whole numbers, got \[2\] of int64"):
        exact_divergences(source, source, token_ids=[0, 1])
    with pytest.raises(SourceError, match=r"got \[3\] of float64"):
        exact_divergences(source, source, token_ids=[0.0, 1.5, 2.0])
    with pytest.raises(SourceError, match="at least 1"):
        exact_divergences(source, source, chunk=0)


def made(tokens: int = 6, vocabulary: int = 700, width: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, width), generator=random), torch.randn((vocabulary, width), generator=random) * 0.5


def logits_of(source: LogitSource) -> torch.Tensor:
    return source.logits(0, source.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_logits_are_those_of_a_linear_layer(dtype: torch.dtype) -> None:
    hidden, weight = (tensor.to(dtype) for tensor in made())
    bias = torch.linspace(-1, 1, 700).to(dtype)
    source = LogitSource(hidden, weight, bias)
    expected = torch.nn.functional.linear(hidden, weight, bias)
    assert source.dtype == dtype
    assert torch.equal(logits_of(source), expected)
    torch.testing.assert_close(source.logits(2, 5), expected[2:5])
    assert LogitSource(hidden, weight, temperature=0.7).logits(0, 6).dtype == torch.promote_types(dtype, torch.float32)


def test_soft_cap_comes_before_temperature() -> None:
    hidden, weight = made()
    found = logits_of(LogitSource(hidden, weight, temperature=0.7, softcap=2.0))
    expected = torch.tanh(hidden @ weight.T / 2.0) * 2.0 / 0.7
    torch.testing.assert_close(found, expected)


def test_soft_cap_is_rounded_as_in_a_half_precision_model() -> None:
    hidden, weight = (tensor.bfloat16() for tensor in made())
    found = logits_of(LogitSource(hidden, weight, softcap=5.0))
    plain = torch.nn.functional.linear(hidden, weight)
    expected = torch.tanh(plain / 5.0) * 5.0
    assert (found == found.bfloat16()).all()
    # Another order of summation moves a product across a rounding boundary once in a while.
    assert (found == expected).float().mean() > 0.99


def test_a_bias_of_minus_infinity_masks() -> None:
    hidden, weight = made()
    bias = torch.zeros(700)
    bias[100:] = -torch.inf
    found = exact_divergences(LogitSource(hidden, weight, bias), LogitSource(hidden, weight))
    short = GivenLogits((hidden @ weight.T)[:, :100])
    assert np.isinf(found.kl).all()
    np.testing.assert_allclose(found.target_entropy, exact_divergences(short, short).target_entropy, rtol=1e-5)


def test_sources_may_differ_in_width_and_dtype() -> None:
    (wide, wide_head), (narrow, narrow_head) = made(width=24), made(width=8, seed=1)
    target = LogitSource(wide.bfloat16(), wide_head.bfloat16())
    behaviour = LogitSource(narrow.double(), narrow_head.double())
    found = exact_divergences(target, behaviour, chunk=4)
    whole = exact_divergences(
        GivenLogits(logits_of(target).double()), GivenLogits(narrow.double() @ narrow_head.double().T)
    )
    np.testing.assert_allclose(found.kl, whole.kl, rtol=1e-9)
    np.testing.assert_allclose(found.tv, whole.tv, rtol=1e-9)


def test_invalid_sources_raise_source_error() -> None:
    hidden, weight = made()
    elsewhere = torch.zeros(700, device="meta")
    for wrong, message in (
        (lambda: LogitSource(hidden, weight[:, :5]), r"\[6, 24\] of float32 and \[700, 5\] of float32"),
        (lambda: LogitSource(hidden.long(), weight), r"\[6, 24\] of int64"),
        (lambda: LogitSource(hidden, weight, torch.zeros(3)), r"bias must be \[700\], got \[3\]"),
        (lambda: LogitSource(hidden, weight, elsewhere), "must be on one device, got meta and cpu"),
        (lambda: LogitSource(hidden, weight[:0]), "at least 1 row, got 0"),
        (lambda: LogitSource(hidden, weight, temperature=0.0), r"temperature must be above 0 and finite, got 0\.0"),
        (lambda: LogitSource(hidden, weight, temperature=np.inf), "temperature .* got inf"),
        (lambda: LogitSource(hidden, weight, softcap=-1.0), r"soft cap .* got -1\.0"),
        (lambda: GivenLogits(hidden[0]), r"logits must be floating-point \[T, V\] with V > 0, got \[24\] of float32"),
        (lambda: GivenLogits(hidden[:, :0]), r"\[6, 0\]"),
        (lambda: GivenLogits(hidden.long()), "of int64"),
    ):
        with pytest.raises(SourceError, match=message):
            wrong()
