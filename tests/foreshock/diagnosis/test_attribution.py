"""Conclusions on a step's attribution: which link is the cause, the trainer's precision, exact divergences."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest

from foreshock.api.attribution import AttributionDocument, ExactOfLinkRecord, NoiseFloorRecord
from foreshock.api.records import NAN
from foreshock.api.replays import MeanRecord
from foreshock.diagnosis.attribution import conclude_attribution, prompts_needed
from foreshock.diagnosis.conclusion import Conclusion
from foreshock.fingerprint import ADAPTER_FLAG, MERGED_ADAPTER, Fingerprint
from foreshock.measures.estimators.attribution import attribute
from foreshock.scorers import EXACT_PAIRS
from tests.foreshock.diagnosis.evidence import TOKENS, attributed, evidence_of, kinds_of


@pytest.mark.parametrize("link", [0, 1, 2])
def test_the_link_that_is_most_of_it_is_named(link: int) -> None:
    sizes = [0.001, 0.001, 0.001]
    sizes[link] = 0.05
    found = attributed((sizes[0], sizes[1], sizes[2]))
    headline = conclude_attribution(evidence_of(found))[0]
    assert (headline.kind, headline.link, headline.names_cause) == ("cause", found.links[link].name, True)
    assert headline.sentence.startswith(f"All of the mismatch is in one link, {found.links[link].cause}")


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "adapter-merged"), ("float32", "cause")])
def test_link_to_a_merged_adapter_says_so_and_is_no_cause(dtype: str, kind: str) -> None:
    made_by = Fingerprint(engine="torch", dtype=dtype, flags={ADAPTER_FLAG: MERGED_ADAPTER})
    source = {
        "scorer": "torch.trainer", "variant": "", "fingerprint_digest": made_by.digest(), "rollouts": 1,
        "fingerprint": made_by.to_dict(), "accelerator": "cpu", "device_name": "cpu",
    }  # fmt: skip
    found = attributed((0.001, 0.05, 0.001))
    conclusions = conclude_attribution(evidence_of(found, scores=[source]))
    assert conclusions[0].kind == kind
    merged = [each.link for each in conclusions if each.kind == "adapter-merged"]
    assert merged == ([found.links[1].name, found.links[2].name] if kind == "adapter-merged" else [])
    assert all("the LoRA adapter merged" in each.sentence for each in conclusions if each.kind == "adapter-merged")


def test_uneven_prompts_with_two_equal_links_name_no_cause() -> None:
    # Both links are as large in truth: each sample has a largest one, and none may be named.
    named = [
        conclusion.sentence
        for seed in range(40)
        for conclusion in conclude_attribution(
            evidence_of(attributed((0.02, 0.02, 0.0), prompts=8, seed=seed, spread=0.6))
        )
        if conclusion.names_cause
    ]
    # The interval is a 95 % one: 1 of 40 is its error.
    assert len(named) <= 3, named


def test_few_prompts_say_how_many_more_would_do() -> None:
    found = attributed((0.02, 0.025, 0.0), prompts=8, per_prompt=16, spread=0.6)
    (said,) = conclude_attribution(evidence_of(found))
    assert (said.kind, said.names_cause) == ("cannot-tell", False)
    assert "with 128 rollouts of 8 prompts: the largest share is " in said.sentence
    assert "more prompts would do (an estimate, if the share stays as it is)." in said.sentence


@pytest.mark.parametrize("seed", [0, 2, 3, 7])
def test_estimated_number_of_prompts_suffices(seed: int) -> None:
    few = evidence_of(attributed((0.02, 0.03, 0.0), prompts=8, spread=0.5, seed=seed))
    link = max(few.links, key=lambda each: each.share)
    needed = prompts_needed(link, few.groups)
    assert needed is not None
    assert needed > few.groups
    many = evidence_of(attributed((0.02, 0.03, 0.0), prompts=needed, spread=0.5, seed=seed + 100))
    assert conclude_attribution(many)[0].names_cause


def test_too_few_prompts_for_an_interval_name_no_cause() -> None:
    (said,) = conclude_attribution(evidence_of(attributed((0.001, 0.05, 0.001), prompts=4)))
    assert said.kind == "cannot-tell"
    assert "no range; more prompts are needed" in said.sentence


def test_equal_links_with_many_prompts_are_no_majority() -> None:
    found = attributed((0.02, 0.018, 0.018), prompts=400, per_prompt=1)
    (said,) = conclude_attribution(evidence_of(found))
    assert (said.kind, said.names_cause) == ("no-majority", False)


def test_equal_ends_do_not_differ() -> None:
    (said,) = conclude_attribution(evidence_of(attributed((0.0, 0.0, 0.0))))
    assert (said.kind, said.sentence) == ("no-difference", "rollout and trainer do not differ at any token.")


def test_cancelling_links_are_reported() -> None:
    evidence = evidence_of(attributed((0.02, 0.02, 0.0)))
    assert "cancellation" not in kinds_of(conclude_attribution(evidence))
    cancelling = dataclasses.replace(evidence, cancellation=3.2)
    assert "is 3.2 times that of the whole" in conclude_attribution(cancelling)[-1].sentence


ROUNDING = 1e-7


def evidence(engine: float, replay: float, trainer: float, prompts: int = 32, seed: int = 0) -> AttributionDocument:
    """Return the evidence where each score is float32's with noise of these sizes; the engine logs what it replays."""
    generator = np.random.default_rng(seed)
    truth = -generator.exponential(1.0, prompts * 4 * TOKENS) - 2.0
    replayed = truth + generator.normal(0, engine, truth.size)
    scores = {
        "torch.float32": truth,
        "rollout": replayed,
        "vllm.prefill": replayed,
        "torch.trainer": truth + generator.normal(0, replay, truth.size),
        "trainer": truth + generator.normal(0, trainer, truth.size),
    }
    groups = [f"prompt-{row // 4}" for row in range(prompts * 4)]
    return evidence_of(attribute(scores, np.arange(0, truth.size + 1, TOKENS), None, groups))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (None, "The trainer computes in float32: torch.float32 reproduces its log-probs (k3 "),
        ("float32", "The trainer computes in float32, as its fingerprint declares: "),
        ("bfloat16", "The trainer computes in float32, though its fingerprint declares bfloat16: "),
    ],
)
def test_trainer_in_float32_is_compared_with_its_declaration(declared: str | None, words: str) -> None:
    (said,) = conclude_attribution(replace(evidence(0.02, 0.02, ROUNDING), declared_precision=declared))
    assert (said.kind, said.names_cause) == ("trainer-precision", True)
    assert said.sentence.startswith(words)
    assert "Request the probe again" in said.sentence


@pytest.mark.parametrize(("replay", "trainer"), [(0.02, 0.02), (0.0, 0.02), (ROUNDING, ROUNDING)])
def test_trainer_that_float32_does_not_tell_apart_is_not_said_to_compute_in_it(replay: float, trainer: float) -> None:
    assert "trainer-precision" not in kinds_of(conclude_attribution(evidence(0.02, replay, trainer)))


@pytest.mark.parametrize(("engine", "replay", "nearer"), [(0.03, 0.01, "torch.trainer"), (0.01, 0.03, "vllm.prefill")])
def test_nearer_score_is_named(engine: float, replay: float, nearer: str) -> None:
    said = [each for each in conclude_attribution(evidence(engine, replay, 0.01)) if each.kind == "nearer-to-reference"]
    assert [each.sentence.split(": ")[1].split(" (")[0] for each in said] == [nearer]


def test_equal_distances_are_not_told_apart() -> None:
    wrong = [
        seed
        for seed in range(40)
        if "nearer-to-reference" in kinds_of(conclude_attribution(evidence(0.02, 0.02, 0.02, prompts=8, seed=seed)))
    ]
    assert len(wrong) <= 5
    sentences = [each.sentence for each in conclude_attribution(evidence(0.02, 0.02, 0.02))]
    assert any("Cannot tell whether vllm.prefill or torch.trainer is nearer to float32" in each for each in sentences)


LINK = next(iter(EXACT_PAIRS))


def mean(value: float, low: float = NAN, high: float = NAN) -> MeanRecord:
    return MeanRecord(mean=value, low=low, high=high)


EXACT = ExactOfLinkRecord(
    kl=mean(3.7e-6, 1.7e-6, 1.1e-5), reverse_kl=mean(NAN), tv=mean(6.1e-5), delta_max=0.019, top1_flip=mean(3e-4),
    target_entropy=mean(NAN), behaviour_entropy=mean(NAN), k3_kl=mean(3.5e-6, 2.9e-7, 5.8e-4), tokens=3294,
    rollouts=32, groups=8, effective_groups=8.0, non_finite=0, pair=LINK, name=EXACT_PAIRS[LINK].name,
    target=EXACT_PAIRS[LINK].target, behaviour=EXACT_PAIRS[LINK].behaviour, from_sample=False, target_fingerprint={},
    behaviour_fingerprint={}, published_at_us=1, other_settings=(),
)  # fmt: skip


def floor_of(scorer: str, k3_kl: float) -> NoiseFloorRecord:
    return NoiseFloorRecord(
        scorer=scorer, comparison="", k3_kl=k3_kl, mean_abs_d=NAN, max_abs_d=NAN, rollouts=32, tokens=3294
    )


def said_of(exact: ExactOfLinkRecord, floor: float | None = None) -> Conclusion:
    floors = () if floor is None else tuple(floor_of(scorer, floor) for scorer in LINK.split("/"))
    found = evidence_of(attributed((0.01, 0.01, 0.01)), floors=floors)
    (said,) = [each for each in conclude_attribution(found, exact=(exact,)) if each.kind == "exact"]
    return said


def test_size_is_said_with_both_intervals_and_what_is_compared() -> None:
    said = said_of(EXACT)
    assert (said.link, said.names_cause) == (LINK, False)
    assert said.sentence == (
        "exact(torch.trainer, vllm.prefill): KL(μ‖π) over the whole vocabulary is 3.7e-6 nats per token (range over "
        "the prompts 1.7e-6 to 1.1e-5), without the sampling noise of k3 at the same tokens, 3.5e-6 (range over the "
        "prompts 2.9e-7 to 5.8e-4); total variation 6.1e-5, Δmax 1.9e-2, the likeliest token differs at 3.0e-2 % of "
        "3,294 visited states. This compares torch.trainer (π) with vllm.prefill (μ) with the same weights: engine "
        "against trainer numerics, not the whole of trainer/rollout."
    )


@pytest.mark.parametrize(
    ("floor", "words"), [(1e-7, "it is above the noise floor"), (1e-4, "it is not above the noise floor")]
)
def test_noise_floor_is_compared_if_the_interval_tells(floor: float, words: str) -> None:
    assert words in said_of(EXACT, floor).sentence


@pytest.mark.parametrize("floor", [None, 5e-6, math.nan])
def test_noise_floor_is_not_mentioned_if_it_is_unknown_or_in_the_interval(floor: float | None) -> None:
    assert "noise floor" not in said_of(EXACT, floor).sentence


def test_noise_floor_is_not_mentioned_without_an_interval() -> None:
    said = said_of(replace(EXACT, kl=mean(EXACT.kl.mean), groups=3), 1e-9)
    assert "noise floor" not in said.sentence
    assert "(no range: 3 prompts, 5 are needed)" in said.sentence


def test_equal_distributions_are_called_equal() -> None:
    said = said_of(replace(EXACT, kl=mean(0.0, 0.0, 0.0), tv=mean(0.0), delta_max=0.0, top1_flip=mean(0.0)))
    assert "the two distributions are equal at each of 3,294 visited states." in said.sentence
    assert "equal" not in said_of(EXACT).sentence


def test_states_left_out_and_other_settings_are_said() -> None:
    assert "2 states with a value that is not finite left out." in said_of(replace(EXACT, non_finite=2)).sentence
    nothing = replace(EXACT, tokens=0, kl=mean(NAN), tv=mean(NAN), non_finite=9)
    assert "no state has finite distributions of both scorers." in said_of(nothing).sentence
    other = said_of(replace(EXACT, other_settings=("autocast", "dtype")))
    assert other.sentence.endswith("Its settings are not those of the link's scores: autocast, dtype differ.")
