"""Logits of hidden states and heads: the same as torch's own, whatever the dtypes, soft caps and temperatures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreshock_probes.exact_divergence import GivenLogits, LogitSource, SourceError, exact_divergences


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
