"""Collect the lint's evidence of a shard; judge a step by its shards' evidence. Independent of the database."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from foreshock import errors, lint
from foreshock.api import steps
from foreshock.lint.checks import sampling
from foreshock.lint.checks.duplicates import prompts_of_step
from foreshock.lint.checks.learning_signal import rewards_by_source
from foreshock.model_kind import ModelKind

WINDOW_CHECKS = ("mismatch_after_id", "k3_per_entropy")
"""The checks that are also made over a window of steps: a padding id is sampled in few responses of a step."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LintPart:
    """Evidence that a shard adds to the lint of its step: mergeable bytes, and examples by check."""

    evidence: bytes
    examples: dict[str, Any]

    @classmethod
    def of(cls, evidence: lint.LintEvidence) -> LintPart:
        """Return the evidence of a shard as it is stored."""
        return cls(evidence.to_bytes(), evidence.examples_to_json())


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Verdict of the lint on a step, and the sums of its surprisal test, which add up over the steps of a run."""

    report: steps.LintRecord
    surprisal_tokens: int
    surprisal: float
    entropy: float
    surprisal_variance: float
    largest_surprisal: float
    sources: dict[str, tuple[int, float]]
    """The number and the sum of the rewards of each data source, if there are several."""
    prompts: list[int]
    """The least hashes of the prompts."""


def judge_step(
    step: int,
    attempt: int,
    shards: Sequence[LintPart],
    entropy: float | None = None,
    model_kind: ModelKind | None = None,
) -> StepVerdict | None:
    """Return the verdict on all shards together; None if no evidence can be read. Unreadable evidence is logged."""
    parts = _readable(shards)
    if not parts:
        return None
    evidence = reduce(lint.LintEvidence.merge, parts)
    found = lint.run_checks(evidence, entropy=entropy, model_kind=model_kind)
    report = steps.LintRecord(
        step=step,
        attempt=attempt,
        shards=len(parts),
        rollouts=found.rollouts,
        tokens=found.tokens,
        warnings=found.warnings,
        checks=found.checks,
    )
    sums = sampling.sums_for_run(evidence)
    # A step is left out of the run's test if damaged log-probs overflow its sums, if its own test is not valid, or if
    # its entropies are those of π, since the test is about μ.
    names = {warning.name for warning in report.warnings}
    counts = all(map(math.isfinite, (sums.surprisal, sums.entropy, sums.variance, sums.largest)))
    if not counts or "entropy_of_trainer" in names or sampling.unreliable_surprisal(evidence, names):
        sums = sampling.SurprisalSums(0, 0.0, 0.0, 0.0, 0.0, 0, math.nan)
    return StepVerdict(
        report, sums.tokens, sums.surprisal, sums.entropy, sums.variance, sums.largest, rewards_by_source(evidence),
        prompts_of_step(evidence),
    )  # fmt: skip


def judge_window(
    shards: Sequence[LintPart], entropy: float | None, model_kind: ModelKind | None
) -> tuple[steps.LintWarningRecord, ...]:
    """Return the findings of WINDOW_CHECKS on the shards of several steps together."""
    parts = [part.across_steps() for part in _readable(shards)]
    if not parts:
        return ()
    report = lint.run_checks(reduce(lint.LintEvidence.merge, parts), entropy=entropy, model_kind=model_kind)
    return tuple(warning for warning in report.warnings if warning.name in WINDOW_CHECKS)


def _readable(shards: Sequence[LintPart]) -> list[lint.LintEvidence]:
    parts = list[lint.LintEvidence]()
    reason = ""
    for shard in shards:
        try:
            parts.append(lint.LintEvidence.from_bytes(shard.evidence, shard.examples))
        except errors.StatisticsError as error:
            reason = str(error)
    if reason:
        # Logged once for all shards, since a window has many.
        _logger.warning(
            "the lint's evidence of %d of %d shards cannot be read (%s): `foreshock remeasure` collects it again",
            len(shards) - len(parts), len(shards), reason,
        )  # fmt: skip
    return parts
