"""Entropies and advantages that are NaN or infinite: where the trainer, or what computes its advantages, broke."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreshock.lint.counting import Counting, Counts
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_percent


@dataclass
class Auxiliary(Counts):
    """The generated tokens' entropies and the advantages, and how many of them are not finite."""

    entropies: int = 0
    entropies_not_finite: int = 0
    advantages: int = 0
    advantages_not_finite: int = 0

    def add_batch(self, counting: Counting) -> None:
        """Count the values of a batch."""
        batch = counting.batch
        generated = slice(None) if batch.response_mask is None else batch.response_mask != 0
        if batch.entropy is not None:
            found = batch.entropy[generated]
            self.entropies += found.size
            self.entropies_not_finite += int(np.count_nonzero(~np.isfinite(found)))
        if batch.advantage is not None:
            of_tokens = batch.advantage.shape == batch.response_token_ids.shape
            found = batch.advantage[generated] if of_tokens else batch.advantage
            self.advantages += found.size
            self.advantages_not_finite += int(np.count_nonzero(~np.isfinite(found)))


def _check(judging: Judging) -> Outcome:
    """Check for NaN and infinite values of the columns that are no log-probs."""
    found = judging[Auxiliary]
    columns = {
        "entropy": (found.entropies_not_finite, found.entropies),
        "advantage": (found.advantages_not_finite, found.advantages),
    }
    wrong = {name: counts for name, counts in columns.items() if counts[0]}
    if not wrong:
        return Clean()
    parts = [f"{count:,} of {total:,} values of {name} are NaN or infinite" for name, (count, total) in wrong.items()]
    shares = [f"{format_percent(*counts)} of the values of {name}" for name, counts in wrong.items()]
    title = f"{' and '.join(shares)} are NaN or infinite"
    return Finding("warning", "; ".join(parts) + ".", {name: count for name, (count, _) in wrong.items()}, title=title)


NON_FINITE_VALUES = Check(
    "non_finite_values",
    "entropies or advantages are NaN or infinite",
    "A loss that reads them is NaN too, and one such update destroys the weights.",
    "Look for rewards that are divided by a spread of 0 or are NaN themselves, and for logits that overflow.",
    _check,
    explains=False,
)
