"""Precision: the trainer's float32 is recognised, and "nearer" is said only where the paired interval tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.diagnosis.attribution import conclude_attribution
from foreshock.diagnosis.conclusion import AttributionEvidence
from foreshock.measures.estimators.attribution import attribute
from tests.foreshock.diagnosis.evidence import TOKENS, evidence_of, kinds_of

ROUNDING = 1e-7


def evidence(engine: float, replay: float, trainer: float, prompts: int = 32, seed: int = 0) -> AttributionEvidence:
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


def test_trainer_in_float32_is_recognised_and_asked_for_again() -> None:
    (said,) = conclude_attribution(evidence(0.02, 0.02, ROUNDING))
    assert (said.kind, said.names_cause) == ("trainer-precision", True)
    assert said.sentence.startswith("The trainer computes in float32: torch.float32 reproduces its log-probs (k3 ")
    assert "Request the probe again" in said.sentence


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (None, "The trainer computes in float32: "),
        ("float32", "The trainer computes in float32, as its fingerprint declares: "),
        ("bfloat16", "The trainer computes in float32, though its fingerprint declares bfloat16: "),
    ],
)
def test_trainer_in_float32_is_compared_with_its_declaration(declared: str | None, words: str) -> None:
    (said,) = conclude_attribution(replace(evidence(0.02, 0.02, ROUNDING), declared_precision=declared))
    assert said.sentence.startswith(words)


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
