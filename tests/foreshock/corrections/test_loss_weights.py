"""The weights that a loop multiplies its loss by, against the evaluator of the same corrections."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.corrections import Evaluator, correction_named, weights
from foreshock.corrections.loss_weights import TRAINED
from foreshock.errors import InvalidArgumentError
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.corrections.direct import sequences_of


def _padded(seed: int, largest: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return d and the mask of a random batch, [N, T], with garbage where the mask is false."""
    sequences = sequences_of(random_batch(seed=seed, rollouts=9, longest=15, largest=largest))
    longest = max(len(each.d) for each in sequences)
    mask = np.array([np.arange(longest) < len(each.d) for each in sequences])
    d = np.full(mask.shape, 50.0)
    d[mask] = [value for each in sequences for value in each.d]
    return d, mask


@pytest.mark.parametrize("kind", TRAINED)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), largest=st.sampled_from((0.1, 1.0, 4.0)))
def test_weights_have_the_evaluators_moments(kind: str, seed: int, largest: float) -> None:
    d, mask = _padded(seed, largest)
    measured = compared(random_batch(seed=seed, rollouts=9, longest=15, largest=largest))
    expected = Evaluator(measured.statistics, measured.summaries).evaluate(kind)
    found = weights(d, mask, kind, expected.used)
    # All tokens of a sequence have its weight.
    each = found[:, 0] if correction_named(kind).level == "sequence" else found[mask]
    assert each.mean() == pytest.approx(expected.weights.mean, rel=1e-9)
    assert each.var() == pytest.approx(expected.weights.variance, rel=1e-6, abs=1e-12)
    assert (found[mask] > 0).mean() == pytest.approx(expected.kept_tokens, rel=1e-12)
    assert not found[~mask].any()


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tensor_gives_a_tensor_of_its_type_without_a_gradient(kind: str, dtype: torch.dtype) -> None:
    d, mask = _padded(7, 1.0)
    tensor = torch.tensor(d, dtype=dtype, requires_grad=True)
    found = weights(tensor, torch.tensor(mask), kind)
    assert (found.dtype, found.shape, found.requires_grad) == (dtype, tensor.shape, False)
    # Half precision is summed in single precision.
    expected = weights(tensor.detach().double().numpy(), mask, kind)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert found.double().numpy() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("kind", TRAINED)
def test_no_token_gives_a_weight_that_is_not_finite(kind: str) -> None:
    d = np.array([[np.nan, 0.1, -np.inf, 0.2], [800.0, -0.1, 0.0, np.nan]], np.float32)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 0]])
    found = weights(d, mask, kind)
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert not found[:, 3].any()
    kept = correction_named(kind).effect == "truncated"
    assert found[1, 0] == (2.0 if kept else 0.0)


def test_a_token_without_log_probs_is_not_corrected() -> None:
    d = np.array([[np.nan, 0.5]])
    assert weights(d, np.ones((1, 2))) == pytest.approx(np.array([[1.0, np.exp(0.5)]]))
    assert weights(d, np.ones((1, 2)), "sequence_tis") == pytest.approx(np.exp([[0.5, 0.5]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token_is",), "kinds: token_tis, token_mis"),
        (("token_tis", 0.5), "one ratio of at least 1"),
        (("icepop", "2_"), "expected a number"),
    ],
)
def test_unknown_kinds_and_thresholds_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        weights(np.zeros((1, 2)), np.ones((1, 2)), *arguments)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"d has the shape \[1, 2\] and the mask \[1, 3\]"):
        weights(np.zeros((1, 2)), np.ones((1, 3)))
