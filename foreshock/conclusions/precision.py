"""Conclusions on precision: whether the trainer computes in float32, and whether engine or trainer is nearer to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreshock.conclusions.conclusion import Conclusion
from foreshock.conclusions.evidence import AttributionEvidence, ReferenceEvidence
from foreshock.conclusions.wording import interval_text, number
from foreshock.scorers import TRAINER_REPLAY

__all__ = ["FLOAT32_ROUNDING", "conclude", "links_of_wrong_precision"]

FLOAT32_ROUNDING = 1e-9
"""The k3 in nats below which two float32 forward passes count as equal: an rms difference of 4.5e-5. Other batch
compositions change a float32 pass by 1e-14 to 1e-12, a bfloat16 pass differs from it by 1e-5 or more."""

_LOGGED, _REPLAYED = "trainer", TRAINER_REPLAY


def conclude(evidence: AttributionEvidence, so_far: Sequence[Conclusion]) -> list[Conclusion]:
    """Return the conclusions from the side branch; none if the reference was not scored."""
    reference = evidence.reference
    if reference is None:
        return []
    if _trainer_is_float32(evidence, reference):
        return [_trainer_precision(evidence, reference)]
    return _nearer(reference)


def links_of_wrong_precision(evidence: AttributionEvidence) -> frozenset[str]:
    """Return the links that end in a replay of the trainer in a precision that is not the trainer's.

    Their shares are due to the request of the probe; none of them is named a cause.
    """
    reference = evidence.reference
    if reference is None or not _trainer_is_float32(evidence, reference):
        return frozenset()
    return frozenset(link.name for link in evidence.links if _REPLAYED in link.name.split("/"))


def _trainer_is_float32(evidence: AttributionEvidence, reference: ReferenceEvidence) -> bool:
    """Return whether the reference equals the logged trainer within rounding and the replayed trainer does not."""
    equal = max(FLOAT32_ROUNDING, evidence.floors.get(reference.reference, 0.0))
    return reference.k3_of(_LOGGED) <= equal < reference.k3_of(_REPLAYED)


def _trainer_precision(evidence: AttributionEvidence, reference: ReferenceEvidence) -> Conclusion:
    logged, replayed = reference.k3_of(_LOGGED), reference.k3_of(_REPLAYED)
    return Conclusion(
        "trainer-precision",
        f"The trainer computes in float32{_as_declared(evidence.declared_precision)}: {reference.reference} "
        f"reproduces its log-probs (k3 {number(logged)}), and "
        f"{_REPLAYED} as requested does not (k3 {number(replayed)}). Request the probe again with {_REPLAYED} in "
        "float32 (autocast none, master_dtype float32).",
        f"{reference.reference}/{_LOGGED}",
        names_cause=True,
    )


def _as_declared(declared: str | None) -> str:
    """Return whether the trainer's fingerprint agrees that it computes in float32; nothing if it declares nothing."""
    if declared is None:
        return ""
    return ", as its fingerprint declares" if declared == "float32" else f", though its fingerprint declares {declared}"


def _nearer(reference: ReferenceEvidence) -> list[Conclusion]:
    engine, trainer = reference.engine, reference.trainer
    if engine is None or trainer is None or math.isnan(reference.difference):
        return []
    if reference.difference == 0 and reference.difference_low == reference.difference_high:
        return [Conclusion("nearer-to-reference", f"{engine} and {trainer} are equally near to float32.")]
    if math.isnan(reference.difference_low) or reference.difference_low <= 0 <= reference.difference_high:
        return [
            Conclusion(
                "cannot-tell",
                f"Cannot tell whether {engine} or {trainer} is nearer to float32: E[d²] of the engine less that of the "
                f"trainer is {_interval(reference)}.",
            )
        ]
    nearer, other = (trainer, engine) if reference.difference > 0 else (engine, trainer)
    return [
        Conclusion(
            "nearer-to-reference",
            f"Nearer to float32 than {other}: {nearer} (E[d²] of the engine less that of the trainer is "
            f"{_interval(reference)}).",
        )
    ]


def _interval(reference: ReferenceEvidence) -> str:
    if math.isnan(reference.difference_low):
        return f"{number(reference.difference)}, without an interval: too few prompts"
    ends = interval_text(reference.difference_low, reference.difference_high, reference.reliable)
    return f"{number(reference.difference)}, {ends}"
