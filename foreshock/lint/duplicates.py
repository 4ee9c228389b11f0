"""Rollouts that are logged more than once: hashes by which copies are found within a shard and across shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.counting import EvidenceBuilder, keys_of_texts, row_ranges, row_sums
from foreshock.lint.report import FALSE_ALARM, Clean, Example, Finding, NotChecked, Outcome, format_number
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.ragged import lengths_of_offsets

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


Keys = NDArray[np.uint64]
_SALT = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND, _THIRD = map(np.uint64, (0xD1342543DE82EF95, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31 = map(np.uint64, (30, 27, 31))
# Weights of positions that are kept in memory: 32 kB.
_SHORT_ROW = 4096


@dataclass(frozen=True, slots=True, eq=False)
class RolloutHashes:
    """Hashes of N rollouts, and log μ of the whole response, [N] each.

    `prompts` hashes the prompt; `contents` the prompt, the response and the bits of its log μ; `order` the sample id,
    which gives an order independent of the other two.
    """

    prompts: Keys
    contents: Keys
    order: Keys
    log_probs: NDArray[np.float64]

    @classmethod
    def empty(cls) -> RolloutHashes:
        """Return the hashes of no rollout."""
        nothing = np.zeros(0, np.uint64)
        return cls(nothing, nothing, nothing, np.zeros(0))

    def merge(self, other: RolloutHashes) -> RolloutHashes:
        """Return the hashes of both."""
        return RolloutHashes(
            np.concatenate([self.prompts, other.prompts]),
            np.concatenate([self.contents, other.contents]),
            np.concatenate([self.order, other.order]),
            np.concatenate([self.log_probs, other.log_probs]),
        )

    def are_distinct(self) -> bool:
        """Return whether no rollout repeats another one; `repeats` then counts none at any level."""
        rising = np.sort(self.contents)
        return not bool((rising[1:] == rising[:-1]).any())

    def repeats(self, *at_most: float) -> list[tuple[int, float]]:
        """Return how many rollouts repeat an earlier one bit for bit, and how many are expected to by chance.

        The chance that a rollout equals one of those before it is Σ μ(y) over the distinct earlier ones of its prompt,
        for any policy: the difference of the two numbers is a martingale with mean 0. The same holds if only responses
        y with log μ(y) ≤ a level count; a single repeat among unlikely responses is significant. There is one result
        for each level of `at_most`.
        """
        if self.prompts.size < 2:
            return [(0, 0.0)] * len(at_most)
        by_prompt = np.lexsort((self.order, self.prompts))
        prompts, contents, log_probs = self.prompts[by_prompt], self.contents[by_prompt], self.log_probs[by_prompt]
        # The first occurrence of each content in this order; the prompt is part of the content.
        is_first = np.zeros(contents.size, dtype=np.bool_)
        is_first[np.unique(contents, return_index=True)[1]] = True
        likelihoods = np.where(is_first, np.exp(np.minimum(log_probs, 0.0)), 0.0)
        begins = np.concatenate([[True], prompts[1:] != prompts[:-1]])
        of_prompt = np.maximum.accumulate(np.where(begins, np.arange(prompts.size), 0))
        found = []
        for level in at_most:
            counts = log_probs <= level
            running = np.concatenate([np.zeros(1), np.cumsum(np.where(counts, likelihoods, 0.0))])
            chance = np.clip(running[:-1] - running[of_prompt], 0.0, 1.0)
            found.append((int((~is_first & counts).sum()), float(chance.sum())))
        return found


def hash_rollouts(batch: RolloutBatch, builder: EvidenceBuilder) -> RolloutHashes:
    """Return the hashes of the rollouts with a response whose log μ is finite; of none if log μ was not logged."""
    behaviour = batch.rollout_log_probs
    lengths = batch.response_lengths
    if behaviour is None or behaviour.size == 0:
        return RolloutHashes.empty()
    generated = behaviour if batch.response_mask is None else np.where(batch.response_mask != 0, behaviour, 0)
    log_probs = row_sums(generated, batch.response_offsets)
    (of_prompts,) = _weighted_sums(batch.prompt_offsets, batch.prompt_token_ids)
    prompts = _mix(of_prompts, lengths_of_offsets(batch.prompt_offsets))
    log_prob_bits = generated.astype(np.float32, copy=False).view(np.uint32)
    bits, ids = _weighted_sums(batch.response_offsets, log_prob_bits, batch.response_token_ids)
    contents = _mix(_mix(_mix(prompts, bits), ids), lengths)
    # Two empty responses are equal for any policy.
    kept = (lengths > 0) & np.isfinite(log_probs)
    hashes = RolloutHashes(prompts[kept], contents[kept], keys_of_texts(batch.sample_ids)[kept], log_probs[kept])
    _add_examples(batch, np.flatnonzero(kept), hashes, builder)
    return hashes


def _add_examples(
    batch: RolloutBatch, rows: NDArray[np.int64], hashes: RolloutHashes, builder: EvidenceBuilder
) -> None:
    """Add the least likely of the rollouts that repeat another one."""
    if hashes.are_distinct():
        return
    _, first, inverse = np.unique(hashes.contents, return_index=True, return_inverse=True)
    repeating = np.flatnonzero(first[inverse] != np.arange(rows.size))
    for index in repeating[np.argsort(hashes.log_probs[repeating], kind="stable")][:3].tolist():
        original = batch.sample_ids[rows[first[inverse[index]]]]
        text = f"equals {original} in every token and log-prob; log μ of the response {hashes.log_probs[index]:.4g}"
        builder.add_example("duplicated_rollouts", Example(batch.sample_ids[rows[index]], -1, text))


def _weighted_sums(offsets: NDArray[np.int64], *columns: NDArray[np.integer]) -> list[Keys]:
    """Return sums of whole numbers weighted by position, modulo 2⁶⁴, shape [N] for each column [T]; another order
    gives another sum.
    """
    lengths = lengths_of_offsets(offsets)
    sums = [np.zeros(lengths.size, np.uint64) for _ in columns]
    weights = _position_weights(int(lengths.max(initial=0)))
    for row, end_row in row_ranges(offsets):
        start, end = int(offsets[row]), int(offsets[end_row])
        starts, of_rows = offsets[row:end_row], lengths[row:end_row]
        filled = of_rows.nonzero()[0]
        if not filled.size:
            continue
        begins = starts[filled] - start
        of_places = weights[np.arange(start, end) - np.repeat(starts, of_rows)]
        for column, of_column in zip(columns, sums, strict=True):
            weighted = of_places * (column[start:end].astype(np.uint64) + np.uint64(1))
            of_column[row + filled] = np.add.reduceat(weighted, begins, dtype=np.uint64)
    return sums


def _position_weights(count: int) -> Keys:
    """Return the weights of the first `count` positions; those of short rows are computed once."""
    return _short_weights()[:count] if count <= _SHORT_ROW else _weights(count)


@cache
def _short_weights() -> Keys:
    return _weights(_SHORT_ROW)


def _weights(count: int) -> Keys:
    return _mix(np.zeros(count, np.uint64), np.arange(count))


def _mix(keys: Keys, values: NDArray[np.integer]) -> Keys:
    """Return one key of a key and an integer (the finalizer of splitmix64)."""
    # Arrays of integers wrap around without a warning.
    mixed = keys * _FIRST + values.astype(np.uint64) + _SALT
    mixed = (mixed ^ (mixed >> _30)) * _SECOND
    mixed = (mixed ^ (mixed >> _27)) * _THIRD
    return np.asarray(mixed ^ (mixed >> _31))


# Repeats are counted among all responses, and among those whose log μ is at most this, in nats.
_LEVELS = (0.0, -1.0, -2.0, -4.0, -6.0, -8.0, -12.0, -16.0, -32.0, -64.0)


def check_duplicates(evidence: LintEvidence, *, distribution_known: bool = True) -> Outcome:
    """Check for more equal rollouts than chance explains.

    `distribution_known` is False if log μ may not be the sampling distribution: then the chance is not known.
    """
    check = "duplicated_rollouts"
    hashes = evidence.rollout_hashes
    if not hashes.prompts.size:
        within_step = "checked within a step, not across steps"
        return NotChecked(check, within_step if evidence.count("rollout_logged") else "needs rollout_log_probs")
    if evidence.count("unknown_repeat_chance") or not distribution_known:
        why = "log μ may not be the sampling distribution: the chance of equal responses is not known"
        return NotChecked(check, why)
    if hashes.are_distinct():
        return Clean(check)
    log_chance, level, repeated, expected = min(
        (_log_chance(*repeats), level, *repeats)
        for level, repeats in zip(_LEVELS, hashes.repeats(*_LEVELS), strict=True)
    )
    if log_chance > math.log(FALSE_ALARM / len(_LEVELS)):
        return Clean(check)
    # A batch logged twice and sampling at temperature 0 look the same.
    one = np.unique(hashes.contents).size == np.unique(hashes.prompts).size < hashes.prompts.size
    greedy = "; no prompt has two different responses: if sampling was greedy, declare temperature 0" if one else ""
    counted = f", counting responses with a probability of at most {format_number(math.exp(level))}" if level else ""
    seen = (
        f"{repeated:,} of {hashes.prompts.size:,} rollouts equal another one of their prompt in every token and in "
        f"every bit of log μ{counted}; {format_number(expected)} are expected by chance{greedy}."
    )
    return Finding(
        check, "warning", seen, {"repeated": repeated, "expected": expected, "rollouts": hashes.prompts.size}
    )


def _log_chance(repeated: int, expected: float) -> float:
    """Return Chernoff's bound of the log of the chance of this many repeats.

    It is the bound of a Poisson tail, which holds for a sum of events whose chances depend on the past (Freedman 1975).
    """
    expected = max(expected, 1e-300)
    return repeated - expected - repeated * math.log(repeated / expected) if repeated > expected else 0.0
