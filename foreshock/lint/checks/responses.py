"""Rollouts and their responses: empty ones, and a batch in which every response was cut off."""

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
_TRUNCATED_SHARE, _LEAST_ROLLOUTS = 0.99, 8


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
ALL_TRUNCATED = Check(
    "all_truncated",
    "every response was cut off at a length limit",
    "Lengths are those of the limit, and rewards those of unfinished answers.",
    "Raise the limit, or check that the end of sequence is among the stop ids.",
    _check_truncated,
    explains=False,
)
