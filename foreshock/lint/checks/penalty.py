"""A penalty on repeated tokens of the engine alone: tokens that occurred before are less likely in μ than in π.

At equal likelihood a temperature, noise and old weights make no difference between tokens that occurred before, in the
prompt or the response, and new ones: of the variance of d they left 1 % or less to it, repetition penalties of 1.05 to
1.2 and presence penalties 50 % and more (a policy of 96 ids). A policy that learns to repeat itself looks the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.checks.pairs import Pairs, if_invalid
from foreshock.lint.counting import Counting, Counts, Table, TokenPairs
from foreshock.lint.judging import Check, Clean, Finding, Judging, Outcome, format_number, format_percent
from foreshock.rollouts.arrays import row_sums
from foreshock.rollouts.batch import RolloutBatch

_MOST_TOKENS = 1 << 15
_LEAST_MEAN_D = 0.01
"""Nats: tokens of a rollout whose mean |d| is below this are not looked up, as those of a healthy run."""
_EDGES = np.array([0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0])
"""Nats of −(log μ + log π)/2 between the bins of tokens of about the same likelihood."""
_LEAST_OF_BIN, _LEAST_TOKENS = 10, 200
_LEAST_DIFFERENCE, _LEAST_Z, _LEAST_SHARE = 0.03, 8.0, 0.2


class ByOccurrence(Table):
    """Tokens, Σ d and Σ d² in nats by twice the bin of likelihood, plus 1 if the token occurred before."""

    COLUMNS = ("tokens", "d", "dd")


@dataclass
class Occurrences(Counts):
    """d of tokens that occurred before in their prompt or response, and of others, in rollouts that differ."""

    table: ByOccurrence = field(default_factory=ByOccurrence)

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        """Sum d of the rollouts of a batch's first pieces in which the two log-probs differ enough."""
        start = int(counting.batch.response_offsets[pairs.rows.start])
        if start >= _MOST_TOKENS:
            return
        lengths = np.diff(pairs.offsets)
        apart = row_sums(np.abs(pairs.d), pairs.offsets) > _LEAST_MEAN_D * lengths
        apart &= start + pairs.offsets[:-1] < _MOST_TOKENS
        if not apart.any():
            return
        rows = slice(pairs.rows.start, pairs.rows.start + int(np.flatnonzero(apart)[-1]) + 1)
        chosen = np.flatnonzero(np.repeat(apart, lengths))
        d = pairs.d[chosen].astype(np.float64)
        likelihood = -0.5 * np.add(pairs.mu[chosen], pairs.pi[chosen], dtype=np.float64)
        keys = 2 * np.searchsorted(_EDGES, likelihood) + occurred(counting.batch, rows)[pairs.places[chosen] - start]
        self.table += ByOccurrence.of(keys, 1.0, d, d * d)


def occurred(batch: RolloutBatch, rows: slice) -> NDArray[np.bool_]:
    """Return whether each response token of some rollouts occurred before in its prompt or response, [T]."""
    prompts, responses = (
        offsets[rows.start : rows.stop + 1] for offsets in (batch.prompt_offsets, batch.response_offsets)
    )
    of_rows = np.arange(prompts.size - 1)
    row = np.r_[np.repeat(of_rows, np.diff(prompts)), np.repeat(of_rows, np.diff(responses))].astype(np.int64)
    of_prompts = batch.prompt_token_ids[prompts[0] : prompts[-1]]
    ids = np.r_[of_prompts, batch.response_token_ids[responses[0] : responses[-1]]].astype(np.int64)
    # Prompts come before responses, so that the first of equal keys is the first occurrence.
    keys = row * (int(ids.max(initial=0)) + 1) + ids
    occurred = np.ones(keys.size, np.bool_)
    occurred[np.unique(keys, return_index=True)[1]] = False
    return occurred[of_prompts.size :]


def _check(judging: Judging) -> Outcome:
    if judging[Pairs].mean_k3 <= judging.healthy_k3:
        return Clean()
    sums = np.zeros((2 * (_EDGES.size + 1), 3))
    table = judging[Occurrences].table
    sums[table.keys.astype(np.int64)] = table.values
    (new, again) = sums[0::2], sums[1::2]
    used = (new[:, 0] >= _LEAST_OF_BIN) & (again[:, 0] >= _LEAST_OF_BIN)
    if sums[:, 0].sum() < _LEAST_TOKENS or not used.any():
        return Clean()
    new, again = new[used], again[used]
    means = [each[:, 1] / each[:, 0] for each in (new, again)]
    variances = [each[:, 2] / each[:, 0] - mean**2 for each, mean in zip((new, again), means, strict=True)]
    weights = new[:, 0] * again[:, 0] / (new[:, 0] + again[:, 0])
    apart = means[1] - means[0]
    between = float((weights * apart**2).sum())
    within = float((new[:, 0] * variances[0] + again[:, 0] * variances[1]).sum())
    difference = float((weights * apart).sum() / weights.sum())
    error = math.sqrt(float((weights**2 * (variances[0] / new[:, 0] + variances[1] / again[:, 0])).sum()))
    error /= float(weights.sum())
    share = between / (between + within) if between + within > 0 else 0.0
    signs = again[:, 1].sum() > 0 > new[:, 1].sum()
    if not signs or difference < max(_LEAST_DIFFERENCE, _LEAST_Z * error) or share < _LEAST_SHARE:
        return Clean()
    seen = (
        f"log π − log μ averages {format_number(float(again[:, 1].sum() / again[:, 0].sum()))} at tokens that occurred "
        f"before in their prompt or response, and {format_number(float(new[:, 1].sum() / new[:, 0].sum()))} at new "
        f"ones; at equal likelihood the two differ by {format_number(difference)}, which is "
        f"{format_percent(share, 1)} of the variance."
    )
    return Finding("warning", seen, {"difference": difference, "share": share})


PENALTY = Check(
    "penalty_of_engine",
    "it looks as if the engine alone had a penalty on repeated tokens",
    "d is mostly the penalty, and so are k3 and every weight.",
    "Compare repetition_penalty, presence_penalty and frequency_penalty of the engine (vLLM applies a model's "
    "generation_config.json) with the trainer, which has none. `foreshock doctor` with the step's weights fits them.",
    _check,
    unless=if_invalid,
    proven=False,
)
