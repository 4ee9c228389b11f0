"""Exact divergences: their size is stated with what it compares, and no cause is named from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from foreshock.diagnosis.attribution import conclude_attribution
from foreshock.diagnosis.conclusion import Conclusion, ExactEvidence
from foreshock.scorers import EXACT_PAIRS
from tests.foreshock.diagnosis.evidence import attributed, evidence_of

LINK = next(iter(EXACT_PAIRS))
EXACT = ExactEvidence(
    link=LINK, kl=3.7e-6, kl_low=1.7e-6, kl_high=1.1e-5, tv=6.1e-5, delta_max=0.019, top1_flip=3e-4, k3_kl=3.5e-6,
    k3_low=2.9e-7, k3_high=5.8e-4, tokens=3294, prompt_groups=8, reliable=True,
)  # fmt: skip


def said_of(exact: ExactEvidence, floor: float | None = None) -> Conclusion:
    floors = {} if floor is None else dict.fromkeys(LINK.split("/"), floor)
    found = evidence_of(attributed((0.01, 0.01, 0.01)), exact=(exact,), floors=floors)
    (said,) = [each for each in conclude_attribution(found) if each.kind == "exact"]
    return said


def test_nothing_is_said_without_exact_divergences() -> None:
    found = conclude_attribution(evidence_of(attributed((0.01, 0.01, 0.01))))
    assert "exact" not in {each.kind for each in found}


def test_size_is_said_with_both_intervals_and_what_is_compared() -> None:
    said = said_of(EXACT)
    assert (said.link, said.names_cause) == (LINK, False)
    assert said.sentence == (
        "exact(torch.trainer, vllm.prefill): KL(μ‖π) over the whole vocabulary is 3.7e-6 nats per token (95 % interval "
        "1.7e-6 to 1.1e-5), without the sampling noise of k3 at the same tokens, 3.5e-6 (95 % interval 2.9e-7 to "
        "5.8e-4); total variation 6.1e-5, Δmax 1.9e-2, the likeliest token differs at 3.0e-2 % of 3,294 visited "
        "states. This compares torch.trainer (π) with vllm.prefill (μ) with the same weights: engine against trainer "
        "numerics, not the whole of trainer/rollout."
    )


def test_unreliable_intervals_are_called_ranges() -> None:
    sentence = said_of(replace(EXACT, reliable=False)).sentence
    assert "(resampling range 1.7e-6 to 1.1e-5)" in sentence
    assert "95 %" not in sentence


@pytest.mark.parametrize(
    ("floor", "words"), [(1e-7, "it is above the noise floor"), (1e-4, "it is not above the noise floor")]
)
def test_noise_floor_is_compared_if_the_interval_tells(floor: float, words: str) -> None:
    assert words in said_of(EXACT, floor).sentence


@pytest.mark.parametrize("floor", [None, 5e-6, math.nan])
def test_noise_floor_is_not_mentioned_if_it_is_unknown_or_in_the_interval(floor: float | None) -> None:
    assert "noise floor" not in said_of(EXACT, floor).sentence


def test_noise_floor_is_not_mentioned_without_an_interval() -> None:
    said = said_of(replace(EXACT, kl_low=math.nan, kl_high=math.nan, prompt_groups=3), 1e-9)
    assert "noise floor" not in said.sentence
    assert "(no interval: 3 prompts, 5 are needed)" in said.sentence


def test_equal_distributions_are_called_equal() -> None:
    said = said_of(replace(EXACT, kl=0.0, kl_low=0.0, kl_high=0.0, tv=0.0, delta_max=0.0, top1_flip=0.0))
    assert "the two distributions are equal at each of 3,294 visited states." in said.sentence
    assert "equal" not in said_of(EXACT).sentence


def test_states_left_out_and_other_settings_are_said() -> None:
    assert "2 states with a value that is not finite left out." in said_of(replace(EXACT, non_finite=2)).sentence
    nothing = replace(EXACT, tokens=0, kl=math.nan, tv=math.nan, non_finite=9)
    assert "no state has finite distributions of both scorers." in said_of(nothing).sentence
    other = said_of(replace(EXACT, other_settings=("autocast", "dtype")))
    assert other.sentence.endswith("Its settings are not those of the link's scores: autocast, dtype differ.")
