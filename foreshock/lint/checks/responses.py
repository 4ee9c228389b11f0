"""Rollouts and their responses: empty and aborted ones, and a batch in which every response was cut off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from foreshock.lint.counting import Counting, Counts
from foreshock.lint.judging import Check, Clean, Finding, Judging, NotChecked, Outcome, format_percent
from foreshock.measures.inputs import truncated_rollouts

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

OF_A_SAMPLE = "only a sample of the rollouts was sent in full"
_EMPTY_SHARE, _LEAST_EMPTY = 0.03, 3
_ABORTED_SHARE, _LEAST_ABORTED = 0.05, 3
_TRUNCATED_SHARE, _LEAST_ROLLOUTS = 0.99, 8
_ABORTS = frozenset({"abort", "aborted", "cancelled", "error"})
"""Finish reasons of a response that the engine gave up, as vLLM, SGLang and slime name them."""


@dataclass
class Rollouts(Counts):
    """Rollouts, their tokens and how their responses ended."""

    rollouts: int = 0
    unseen: int = 0  # outside the sample, of shards that were sent as statistics with a sample
    tokens: int = 0  # generated
    masked: int = 0
    empty: int = 0  # without a response token
    finish_known: int = 0
    truncated: int = 0
    aborted: int = 0  # of those in `rollouts`
    reasons: int = 0  # rollouts with a finish reason

    def add_batch(self, counting: Counting) -> None:
        """Count the rollouts of a batch."""
        batch = counting.batch
        truncated, known = truncated_rollouts(batch)
        generated = int(batch.generated_lengths.sum())
        self.rollouts += batch.num_rollouts
        self.tokens += generated
        self.masked += batch.num_tokens - generated
        self.empty += int(np.count_nonzero(batch.response_lengths == 0))
        self.finish_known += int(known.sum())
        self.truncated += int(truncated.sum())
        reasons = [reason for reason in batch.finish_reasons or () if reason is not None]
        self.aborted += sum(reason in _ABORTS for reason in reasons)
        self.reasons += len(reasons)

    def of_sample(self, measured: StepMeasurement) -> Self:
        """Return the counts with the truncated responses of all rollouts."""
        truncated, known = measured.step.truncated_and_known()
        unseen = measured.step.rollouts - self.rollouts
        return replace(self, unseen=unseen, truncated=truncated, finish_known=known)


def _check_empty(judging: Judging) -> Outcome:
    """Check for many empty responses."""
    rollouts, empty = judging[Rollouts].rollouts, judging[Rollouts].empty
    if empty < max(_LEAST_EMPTY, _EMPTY_SHARE * rollouts):
        return Clean()
    seen = f"{empty:,} of {rollouts:,} responses ({format_percent(empty, rollouts)}) have no token."
    return Finding("critical" if empty == rollouts else "warning", seen, {"empty": empty})


def _check_aborted(judging: Judging) -> Outcome:
    """Check for responses that the engine gave up, and that are trained on as if they had ended."""
    known, aborted = judging[Rollouts].reasons, judging[Rollouts].aborted
    if not known:
        return NotChecked("needs finish_reason")
    if aborted < max(_LEAST_ABORTED, _ABORTED_SHARE * known):
        return Clean()
    share = format_percent(aborted, known)
    seen = f"{aborted:,} of {known:,} responses ({share}) were ended by an abort."
    return Finding("warning", seen, {"aborted": aborted}, title=f"{share} of the responses were ended by an abort")


def _check_truncated(judging: Judging) -> Outcome:
    """Check for a batch in which every response was cut off."""
    known, cut = judging[Rollouts].finish_known, judging[Rollouts].truncated
    if not known:
        return NotChecked("needs finish_reason or length_cap")
    if known < _LEAST_ROLLOUTS or cut < _TRUNCATED_SHARE * known:
        return Clean()
    seen = f"{cut:,} of {known:,} responses ({format_percent(cut, known)}) were cut off at a length limit."
    return Finding("warning", seen, {"truncated": cut, "rollouts": known})


EMPTY = Check(
    "empty_responses",
    "responses are empty",
    "They have no token to measure, and lower the mean length.",
    "Look at what the engine returned for these prompts: an end of sequence at once, or a failed request.",
    _check_empty,
    explains=False,
)
ABORTED = Check(
    "aborted_responses",
    "responses were ended by an abort",
    "Their last token is no end that the policy chose, and their rewards are those of unfinished answers.",
    "Leave them out of the update, or resume them: a pause for new weights aborts what is in flight.",
    _check_aborted,
    explains=False,
)
ALL_TRUNCATED = Check(
    "all_truncated",
    "every response was cut off at a length limit",
    "Lengths are those of the limit, and rewards those of unfinished answers.",
    "Raise the limit, or check that the end of sequence is among the stop ids.",
    _check_truncated,
    explains=False,
)
