"""The tables of the lint's evidence: sums by prompt group, dropped token ids, marks of rollouts. All of them merge."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.statistics.compensated_sums import CompensatedSums

__all__ = ["DroppedIds", "GroupSums", "RolloutMarks", "key_of_text", "keys_of_texts"]

Float64 = NDArray[np.float64]
Keys = NDArray[np.uint64]

_DROPPED_IDS_KEPT = 256
GROUP_COLUMNS = ("surprisal", "ratio_minus_one")


@dataclass(frozen=True, slots=True, eq=False)
class GroupSums:
    """Per prompt group (a rollout without one is its own): `tokens` [G] with two log-probs, `sums` [G, 2] of
    −log μ − H and of ρ − 1."""

    keys: Keys
    tokens: NDArray[np.int64]
    sums: CompensatedSums

    @classmethod
    def of(cls, keys: Keys, tokens: NDArray[np.int64], sums: Float64) -> GroupSums:
        """The sums by group of N rollouts with these group keys."""
        unique, inverse = np.unique(keys, return_inverse=True)
        totals = np.zeros((unique.size, len(GROUP_COLUMNS)))
        np.add.at(totals, inverse, sums)
        counted = np.bincount(inverse, tokens, unique.size).astype(np.int64)
        return cls(unique, counted, CompensatedSums(totals, np.zeros_like(totals)))

    def merge(self, other: GroupSums) -> GroupSums:
        """The groups of both; those that both have are added."""
        union = np.union1d(self.keys, other.keys)
        tokens = np.zeros(union.size, np.int64)
        sums = CompensatedSums.zeros(union.size, 2)
        for part in (self, other):
            slots = np.searchsorted(union, part.keys)
            tokens[slots] += part.tokens
            total = CompensatedSums(sums.high[slots], sums.low[slots]) + part.sums
            sums.high[slots], sums.low[slots] = total.high, total.low
        return GroupSums(union, tokens, sums)

    @property
    def count(self) -> int:
        """How many groups."""
        return int(self.keys.size)

    def z_of_zero(self, column: str) -> float:
        """Σ_g S_g / √(Σ_g S_g²): standardised, clustered by group, where the mean of S should be 0."""
        values = self.sums.value[:, GROUP_COLUMNS.index(column)]
        square = float(np.square(values).sum())
        return float(values.sum()) / math.sqrt(square) if 0.0 < square < math.inf else math.nan

    def mean_and_t(self, column: str) -> tuple[float, float]:
        """The token mean, and its Student's t against 0 with the errors of group residuals; NaN where not estimable."""
        values, total = self.sums.value[:, GROUP_COLUMNS.index(column)], int(self.tokens.sum())
        if total == 0:
            return math.nan, math.nan
        mean = float(values.sum()) / total
        groups = int((self.tokens > 0).sum())
        square = float(np.square(values - mean * self.tokens).sum())
        if groups < 2 or not math.isfinite(square):
            return mean, math.nan
        error = math.sqrt(square * groups / (groups - 1)) / total
        if error == 0.0:
            return mean, math.copysign(math.inf, mean) if mean else 0.0
        return mean, mean / error


@dataclass(frozen=True, slots=True, eq=False)
class DroppedIds:
    """Token ids that lost a log-prob: `counts` [K, 3] of generated tokens with a real log μ that have no log π (0, NaN
    or −inf), of masked tokens with a log μ, and of all tokens of the id that are either or have a real log μ."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> DroppedIds:
        """The table, of the ids that lost most."""
        if ids.size > _DROPPED_IDS_KEPT:
            kept = np.sort(np.lexsort((ids, -(counts[:, 0] + counts[:, 1])))[:_DROPPED_IDS_KEPT])
            ids, counts = ids[kept], counts[kept]
        return cls(ids, counts)

    @classmethod
    def empty(cls) -> DroppedIds:
        """No id lost one."""
        return cls(np.zeros(0, np.int64), np.zeros((0, 3), np.int64))

    def merge(self, other: DroppedIds) -> DroppedIds:
        """The ids of both."""
        union = np.union1d(self.ids, other.ids)
        counts = np.zeros((union.size, 3), np.int64)
        for part in (self, other):
            counts[np.searchsorted(union, part.ids)] += part.counts
        return DroppedIds.of(union, counts)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutMarks:
    """By which the same rollout is known again, [N] each: its prompt, its content (prompt, response and the bits of its
    log μ), an order that has nothing to do with either (of its id), and log μ of the whole response."""

    prompts: Keys
    contents: Keys
    order: Keys
    log_probs: Float64

    def merge(self, other: RolloutMarks) -> RolloutMarks:
        """The marks of both."""
        return RolloutMarks(
            np.concatenate([self.prompts, other.prompts]),
            np.concatenate([self.contents, other.contents]),
            np.concatenate([self.order, other.order]),
            np.concatenate([self.log_probs, other.log_probs]),
        )

    def repeats(self, at_most: float = 0.0) -> tuple[int, float]:
        """How many rollouts repeat an earlier one bit for bit, and how many would by chance.

        The chance that a rollout equals one of those before it is Σ μ(y) over the distinct ones before it of its
        prompt, whatever the policy: so the difference of the two numbers has the mean 0 (a martingale). The same holds
        where only responses y with log μ(y) ≤ `at_most` count; among unlikely ones a single repeat says a lot.
        """
        if self.prompts.size < 2:
            return 0, 0.0
        by_prompt = np.lexsort((self.order, self.prompts))
        prompts, contents, log_probs = self.prompts[by_prompt], self.contents[by_prompt], self.log_probs[by_prompt]
        # A content's first place in this order, within its prompt (the prompt is part of the content).
        is_first = np.zeros(contents.size, dtype=np.bool_)
        is_first[np.unique(contents, return_index=True)[1]] = True
        counts = log_probs <= at_most
        probabilities = np.where(is_first & counts, np.exp(np.minimum(log_probs, 0.0)), 0.0)
        running = np.concatenate([np.zeros(1), np.cumsum(probabilities)])
        begins = np.concatenate([[True], prompts[1:] != prompts[:-1]])
        of_prompt = np.maximum.accumulate(np.where(begins, np.arange(prompts.size), 0))
        chance = np.clip(running[:-1] - running[of_prompt], 0.0, 1.0)
        return int((~is_first & counts).sum()), float(chance.sum())


def key_of_text(text: str) -> int:
    """A 64-bit key of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def keys_of_texts(texts: Sequence[str]) -> Keys:
    """[N] the key of each text; equal texts are hashed once."""
    known: dict[str, int] = {}
    for text in texts:
        if text not in known:
            known[text] = key_of_text(text)
    return np.array([known[text] for text in texts], dtype=np.uint64)
