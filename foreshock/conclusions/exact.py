"""Conclusions on exact divergences over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock.conclusions.conclusion import Conclusion
from foreshock.conclusions.evidence import AttributionEvidence

__all__ = ["conclude"]


def conclude(evidence: AttributionEvidence, so_far: Sequence[Conclusion]) -> list[Conclusion]:
    """Return the conclusions of this rule; `so_far` are those of the rules before it."""
    return []
