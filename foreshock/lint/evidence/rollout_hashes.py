"""Hashes of rollouts, by which copies are found within a shard and across the shards of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.lint.evidence.group_sums import keys_of_texts
from foreshock.lint.evidence.pieces import row_ranges, row_sums
from foreshock.lint.report import Example
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["RolloutHashes", "hash_rollouts"]

Keys = NDArray[np.uint64]
_SALT = np.uint64(0x9E3779B97F4A7C15)


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
    prompts = _mix(_weighted_sums(batch.prompt_token_ids, batch.prompt_offsets), np.diff(batch.prompt_offsets))
    bits = _weighted_sums(generated.astype(np.float32, copy=False).view(np.uint32), batch.response_offsets)
    ids = _weighted_sums(batch.response_token_ids, batch.response_offsets)
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
    unique, first, inverse = np.unique(hashes.contents, return_index=True, return_inverse=True)
    if unique.size == rows.size:
        return
    repeating = np.flatnonzero(first[inverse] != np.arange(rows.size))
    for index in repeating[np.argsort(hashes.log_probs[repeating], kind="stable")][:3].tolist():
        original = batch.sample_ids[rows[first[inverse[index]]]]
        text = f"equals {original} in every token and log-prob; log μ of the response {hashes.log_probs[index]:.4g}"
        builder.add_example("duplicated_rollouts", Example(batch.sample_ids[rows[index]], -1, text))


def _weighted_sums(values: NDArray[np.integer], offsets: NDArray[np.int64]) -> Keys:
    """Return sums of whole numbers weighted by position, modulo 2⁶⁴, shape [N]; another order gives another sum."""
    sums = np.zeros(offsets.size - 1, np.uint64)
    longest = int(np.diff(offsets).max(initial=0))
    weights = _mix(np.zeros(longest, np.uint64), np.arange(longest))
    for row, end_row in row_ranges(offsets):
        start, end = int(offsets[row]), int(offsets[end_row])
        starts = offsets[row:end_row]
        places = np.arange(start, end) - np.repeat(starts, np.diff(offsets[row : end_row + 1]))
        weighted = weights[places] * (values[start:end].astype(np.uint64) + np.uint64(1))
        filled = np.flatnonzero(np.diff(offsets[row : end_row + 1]))
        if filled.size:
            sums[row + filled] = np.add.reduceat(weighted, starts[filled] - start, dtype=np.uint64)
    return sums


def _mix(keys: Keys, values: NDArray[np.integer]) -> Keys:
    """Return one key of a key and an integer (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = keys * np.uint64(0xD1342543DE82EF95) + values.astype(np.uint64) + _SALT
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
