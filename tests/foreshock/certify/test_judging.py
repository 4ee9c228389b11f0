"""Verdicts on two computations, by a floor that is measured on the same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshock.certify.certificate import ESS_TOKENS
from foreshock.certify.judging import judged, largest_tokens
from tests.foreshock.certify.making import PROMPTS, TOKENS, log_probs, replays, tokens_of

BATCH = tokens_of()
MU = log_probs(0)


def test_equal_log_probs_are_identical() -> None:
    verdict, size = judged(BATCH, MU, MU.copy(), replays(), "bfloat16")
    assert verdict == "identical"
    assert (size.equal, size.k3, size.largest, size.ess) == (1.0, 0.0, 0.0, 1.0)


def test_one_bit_is_rounding() -> None:
    other = MU.copy()
    other[5] = np.nextafter(other[5], np.float32(0))
    verdict, size = judged(BATCH, other, MU, replays(), "bfloat16")
    assert verdict == "rounding"
    assert size.equal == pytest.approx(1 - 1 / MU.size)


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_precision_is_rounding(seed: int) -> None:
    assert judged(BATCH, log_probs(seed, 0.01), MU, replays(0.01), "bfloat16")[0] == "rounding"


@pytest.mark.parametrize("seed", range(20))
def test_three_times_the_noise_of_precisions_is_different(seed: int) -> None:
    assert judged(BATCH, log_probs(seed, 0.03), MU, replays(0.01), "bfloat16")[0] == "different"


def test_rounding_at_unsteady_tokens_hides_no_change_at_steady_ones() -> None:
    """A tenth of the tokens rounds a hundred times worse; a change moves the others by five times their noise."""
    rough = np.arange(MU.size) % 10 == 0
    noises = [np.random.default_rng(seed).normal(size=MU.size) * np.where(rough, 0.3, 0.003) for seed in (1, 2, 3, 4)]
    precisions = [(MU + noise).astype(np.float32) for noise in noises[:3]]
    healthy = (MU + noises[3]).astype(np.float32)
    assert judged(BATCH, healthy, MU, precisions, "bfloat16")[0] == "rounding"
    changed = healthy + np.where(rough, 0.0, 0.03).astype(np.float32)
    verdict, size = judged(BATCH, changed, MU, precisions, "bfloat16")
    assert size.half_square_low < size.floor
    assert verdict == "different"


def test_float32_has_a_floor_of_its_own() -> None:
    precisions = [log_probs(seed, 1e-6) for seed in (1, 2)]
    assert judged(BATCH, log_probs(5, 1e-6), MU, precisions, "float32")[0] == "rounding"
    assert judged(BATCH, log_probs(5, 1e-4), MU, precisions, "float32")[0] == "different"


def test_only_chosen_tokens_count() -> None:
    chosen = np.arange(MU.size) % TOKENS == TOKENS - 1
    other = np.where(chosen, MU, np.float32(-9.0))
    verdict, size = judged(BATCH, other, MU, replays(), "bfloat16", chosen)
    assert (verdict, size.tokens) == ("identical", PROMPTS)


def test_size_is_that_of_the_ratios() -> None:
    """A constant d = 0.5 has k3 = e^0.5 − 1.5, and all ratios are beyond the clip range, with equal weights."""
    _, size = judged(BATCH, (MU + 0.5).astype(np.float32), MU, replays(), "bfloat16")
    assert size.k3 == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)
    assert size.beyond_clip == 1.0
    assert size.half_square == pytest.approx(0.125, rel=1e-5)
    assert size.ess == pytest.approx(1.0, abs=1e-3)


def test_ess_is_that_of_independent_tokens() -> None:
    sigma = 0.02
    _, size = judged(BATCH, log_probs(3, sigma), MU, replays(), "bfloat16")
    assert size.ess == pytest.approx(math.exp(-ESS_TOKENS * sigma**2), abs=0.08)


def test_prompts_have_the_sums_of_their_tokens() -> None:
    _, size = judged(BATCH, log_probs(2, 0.05), MU, replays(), "bfloat16")
    assert [each.tokens for each in size.prompts] == [TOKENS] * PROMPTS
    total = sum(each.half_squares for each in size.prompts)
    assert total / MU.size == pytest.approx(size.half_square)


def test_tokens_that_differ_most_are_named() -> None:
    other = MU.copy()
    other[TOKENS + 3] -= 4
    assert f"id {BATCH.response_token_ids[TOKENS + 3]} at place 3 of rollout p1" in largest_tokens(BATCH, other, MU)
