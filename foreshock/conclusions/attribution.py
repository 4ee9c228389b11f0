"""All conclusions on the attribution of a step, the most important first."""

from __future__ import annotations

from foreshock.conclusions import causes, environments, exact, precision, weights
from foreshock.conclusions.conclusion import Conclusion
from foreshock.conclusions.evidence import AttributionEvidence

__all__ = ["conclude_attribution"]

# Each rule sees the conclusions of the rules before it.
_RULES = (environments.conclude, weights.conclude, causes.conclude, precision.conclude, exact.conclude)


def conclude_attribution(evidence: AttributionEvidence) -> tuple[Conclusion, ...]:
    """Return the conclusions on a step's attribution; the first one is the headline."""
    found: list[Conclusion] = []
    for conclude in _RULES:
        found += conclude(evidence, tuple(found))
    return tuple(found)
