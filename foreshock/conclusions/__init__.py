"""Conclusions: every sentence about a run's attribution and health, made from stored numbers.

The report, the pages and the API show these sentences verbatim and add none of their own.
"""

from foreshock.conclusions.attribution import conclude_attribution
from foreshock.conclusions.conclusion import Conclusion, ConclusionKind
from foreshock.conclusions.evidence import (
    AttributionEvidence,
    DriftPoint,
    EnvironmentLinkEvidence,
    ExactEvidence,
    LinkEvidence,
    ReferenceEvidence,
)

__all__ = [
    "AttributionEvidence",
    "Conclusion",
    "ConclusionKind",
    "DriftPoint",
    "EnvironmentLinkEvidence",
    "ExactEvidence",
    "LinkEvidence",
    "ReferenceEvidence",
    "conclude_attribution",
]
