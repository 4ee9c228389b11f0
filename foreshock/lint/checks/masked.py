"""Masked tokens that carry values, maybe of whole responses; placeholders at masked tokens are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from foreshock.lint.checks.responses import Rollouts
from foreshock.lint.constants import constant_of_masked
from foreshock.lint.counting import Bools, Counting, Counts, Floats, Ints
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_percent
from foreshock.measures.inputs import truncated_rollouts
from foreshock.rollouts.arrays import rows_of_positions
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs


@dataclass
class Masked(Counts):
    """Masked tokens with a value other than 0 or a constant; without truncated responses that are masked as a whole.

    `finished` are the responses that are masked as a whole and are known not to be cut, `of_finished` their tokens with
    a log μ.
    """

    rollout: int = 0
    trainer: int = 0
    entropy: int = 0
    advantage: int = 0
    placeholders: int = 0
    finished: int = 0
    of_finished: int = 0

    def add_batch(self, counting: Counting) -> None:
        batch = counting.batch
        masked = masked_places(batch)
        if not masked.size:
            return
        columns = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs, "entropy": batch.entropy}
        columns["advantage"] = batch.advantage if batch.advantage_per_token else None
        truncated, is_known = truncated_rollouts(batch)
        is_whole = (batch.generated_lengths == 0) & (batch.response_lengths > 0)
        finished = is_whole & is_known & ~truncated
        self.finished += int(finished.sum())
        rows = rows_of_positions(batch.response_offsets, masked)
        outside = ~(truncated & is_whole)[rows]
        for name, column in columns.items():
            if column is None:
                continue
            values = column[masked]
            found = np.isfinite(values) & (values != 0) if name == "advantage" else carries(values)
            if name in ("rollout", "trainer"):
                constant = found & np.isin(values, constant_of_masked(values))
                self.placeholders += int(
                    np.count_nonzero(np.isfinite(values) & ~are_log_probs(values)) + constant.sum()
                )
                found &= ~constant
            found &= outside
            places = masked[found]
            setattr(self, name, getattr(self, name) + places.size)
            if name == "rollout":
                self.of_finished += int(finished[rows[found]].sum())
            if name in ("rollout", "advantage"):
                what = f"{name} log-prob" if name == "rollout" else name
                for place in places[:2].tolist():
                    counting.add_token("masked_values", place, f"{what} {column[place]:.4g}, mask 0")


def masked_places(batch: RolloutBatch) -> Ints:
    """Return the positions of the masked tokens."""
    return np.zeros(0, np.int64) if batch.response_mask is None else np.flatnonzero(batch.response_mask == 0)


def carries(values: Floats) -> Bools:
    """Return True for each log-prob or entropy other than 0, [T]."""
    return np.asarray(are_log_probs(values) & (values != 0))


def outside_overlong(batch: RolloutBatch, masked: Ints) -> Ints:
    """Return the masked positions without those of truncated responses that are masked as a whole.

    Overlong filtering (DAPO) masks these to keep them out of the loss. The model sampled them, so they may have values.
    """
    if not masked.size:
        return masked
    overlong = truncated_rollouts(batch)[0] & (batch.generated_lengths == 0)
    return np.asarray(masked[~overlong[rows_of_positions(batch.response_offsets, masked)]])


_NAMES = {"rollout": "a log μ", "advantage": "an advantage", "trainer": "a log π", "entropy": "an entropy"}


_MOST: Final = 0.9
"""A filter of responses is told if it makes this part of the masked tokens with a log μ."""
_FILTER = (
    "If it is not meant, look at the filter of overlong responses: it must know each token id that ends a response, or "
    "go by the finish reason."
)


def _check(judging: Judging) -> Outcome:
    """Check for masked tokens with a log μ or an advantage; those of a `pad_id_sampled` are not counted again."""
    masked = judging[Rollouts].masked
    if not masked:
        return Clean("no token is masked")
    numbers = {name: getattr(judging[Masked], name) for name in _NAMES}
    if judging.found("pad_id_sampled"):
        numbers["rollout"] = 0
    if not (numbers["rollout"] or numbers["advantage"]):
        return Clean()
    found = judging[Masked]
    if found.of_finished and found.of_finished >= _MOST * numbers["rollout"]:
        rollouts = judging[Rollouts].rollouts
        title = f"{format_percent(found.finished, rollouts)} of the responses were not cut and are masked as a whole"
        seen = f"{found.finished:,} of {rollouts:,} responses were not cut and have mask 0 at every token."
        return Finding("warning", seen, {"finished": found.finished}, title=title, remedy=_FILTER)
    counted = ", ".join(f"{number:,} have {_NAMES[name]}" for name, number in numbers.items() if number)
    return Finding("warning", f"Of {masked:,} masked tokens, {counted} other than 0.", {"masked": masked, **numbers})


MASKED = Check(
    "masked_values",
    "masked tokens carry values",
    "Mask and values contradict each other: if the model sampled these tokens, the measures leave them out; if it "
    "did not, an advantage trains on tool output.",
    "Mask exactly the tokens that the model did not sample, and set log μ and advantages to 0 there. (log π and "
    "entropy at masked tokens are normal: a forward pass scores all tokens.)",
    _check,
    explains=False,
)
