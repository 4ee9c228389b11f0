"""The evidence that the lint takes from a batch: small, mergeable over shards and steps, stored by the service."""

from __future__ import annotations

from foreshock.lint.evidence.collect import collect_evidence
from foreshock.lint.evidence.lint_evidence import LintEvidence

__all__ = ["LintEvidence", "collect_evidence"]
