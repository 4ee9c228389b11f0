"""The lint's evidence of one shard. Runs in a decoder process: knows batches, not databases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foreshock.lint import collect_evidence
from foreshock.rollouts import RolloutBatch


@dataclass(frozen=True, slots=True)
class LintPart:
    """The evidence that a shard adds to the lint of its step: mergeable bytes, and examples by check."""

    evidence: bytes
    examples: dict[str, Any]


def lint_shard(batch: RolloutBatch) -> LintPart:
    """Return the evidence of a batch."""
    evidence = collect_evidence(batch)
    return LintPart(evidence.to_bytes(), evidence.examples_to_json())
