"""The parts that count the evidence of a batch: names, sums by prompt group, pieces of the batch, and the builder.

Counts, sums and extremes are named in the order in which they are stored. Counts and sums merge by adding, extremes by
taking the larger. A stored blob holds them by position: a new name needs a new version in `evidence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.report import Example
from foreshock.measures.statistics.clusters import keys_of_texts
from foreshock.measures.statistics.compensated_sums import CompensatedSums
from foreshock.rollouts.arrays import row_ranges
from foreshock.rollouts.batch import RolloutBatch

# The two columns of log-probs: rollout_log_probs (log μ) and trainer_log_probs (log π).
COLUMNS = ("rollout", "trainer")

_OF_COLUMNS = (
    "logged",  # generated tokens with the column
    "nan",
    "minus_inf",
    "plus_inf",
    "placeholders",  # finite, but no log-prob of a sampled token: see `are_log_probs`
    "placeholders_above",  # of these: above 0
    "placeholders_beside",  # next to another one
    "positive",  # finite and above 0 by more than float32 rounds
    "negative",  # finite and below 0 by more than rounding
    "above_one",
    "rounding_seen",  # tokens of the sample that was tested for rounding
    "as_bfloat16",  # of these: exactly representable in bfloat16
    "as_float16",
    "large_seen",  # of `rounding_seen`: |log-prob| of 0.5 or more; few such values fit by chance
    "large_as_bfloat16",
    "large_as_float16",
    "non_finite_first",  # not finite, at the first or the last generated token of a response
    "non_finite_last",
)

COUNTS = (
    "rollouts",
    "rollouts_unseen",  # rollouts outside the sample, of shards that were sent as statistics with a sample
    "tokens",  # generated
    "tool_tokens",
    *(f"{column}_{name}" for column in COLUMNS for name in _OF_COLUMNS),
    "paired",  # generated tokens with two finite log-probs
    "equal",  # of these: bit for bit the same number
    "uncertain",  # of `paired`: log μ below UNCERTAIN
    "copiable_rollouts",  # rollouts with eight uncertain tokens or more
    "copied_rollouts",  # of these: log π equals log μ at every uncertain token
    "certain_behaviour",  # log μ = 0, and log π clearly below
    "no_mu",  # log μ exactly 0 and log π clearly below; or log μ a constant and log π clearly different
    "no_mu_first",  # of `no_mu`: at the first token of a response, at the last, in a run of zeros up to the end
    "no_mu_last",
    "no_mu_trailing",
    "no_mu_beside",  # of `no_mu`: next to another one
    "above_zero",  # d clearly above 0
    "below_zero",  # d clearly below 0
    "far_below_zero",  # d below what usual truncation can give
    "large",  # |d| of LARGE_D or more
    "clip_known",  # of `paired`: with a declared clip range
    "clipped",  # of these: with a ratio outside it
    "shift_tokens",
    "shift_rollouts",
    "shift_prefer_earlier",
    "shift_prefer_later",
    "shift_clear_earlier",  # rollouts in which the neighbour fits at least four times as well
    "shift_clear_later",
    "scale_tokens",  # with two finite log-probs clearly below 0
    "surprisal_tokens",
    "broad_tokens",  # of these: with an entropy above 0.5
    "missing_first",  # no log π beside a real log μ, at the first or the last token of a response
    "missing_last",
    "dropped_first",  # masked with a log μ, at the first or the last token of a response
    "dropped_last",
    "masked_placeholders",
    "masked_rollout",
    "masked_trainer",
    "masked_entropy",
    "masked_advantage",
    # Rollouts by their declared sampling.
    "declared_tempered",
    "declared_truncated",
    "declared_shaped",
    "declared_plain",  # temperature 1, top-p 1, and neither top-k nor min-p
    "sampling_unknown",
    "mode_raw",
    "mode_processed",
    "mode_unknown",
    "raw_and_shaped",
    "processed_and_truncated",
    "shaped_mode_unknown",
    "unknown_repeat_chance",  # greedy, or shaped and logged raw: log μ does not give the chance of a repeat
    "declared_bypass",
    "declared_policy",
    # The learning signal.
    "empty_rollouts",  # without a response token
    "finish_known",
    "truncated_rollouts",
    "grouped_rollouts",  # with a group id
    "advantages",
    "advantages_not_zero",
    "versions_alone",  # rollouts with weights versions, and no version of the trainer
)

SUMS = (
    "shift_earlier",  # Σ|log π_t − log μ_{t−1}|, each at most 5
    "shift_none",
    "shift_later",
    "no_mu_log_pi",  # Σ log π over `no_mu`
    "no_mu_k3",
    "scale_mu",  # Σ log μ and Σ log π over `scale_tokens`
    "scale_pi",
    # Σ log μ · log π, Σ (log μ)² and Σ (log π)² over `scale_tokens`, likely ones (log μ above −1) and others.
    *(f"scale_{part}_{product}" for part in ("likely", "unlikely") for product in ("cross", "mu", "pi")),
    "paired_k3",  # Σ(ρ − 1 − d) over tokens with two finite log-probs
    "paired_surprisal",  # Σ −log μ over the same tokens
    "surprisal",  # Σ −log μ
    "entropy",  # Σ H
    "target_surprisal",  # Σ ρ·(−log π), over tokens with two finite log-probs and an entropy
    "target_entropy",  # Σ H over the same tokens
    "sharp_bound",  # Σ of the bound of E[(−log μ)²] over tokens with an entropy of at most 0.5
    "broad_bound",  # the same at entropies above 0.5
    "broad_squares",  # Σ (−log μ − H)² at entropies above 0.5
    "rollout_bfloat16_variance",  # Σ of the squared spacing of bfloat16 values, over `rounding_seen`
    "rollout_float16_variance",
    "trainer_bfloat16_variance",
    "trainer_float16_variance",
)

# Merged by taking the larger value; a minimum is stored negated.
EXTREMES = (
    "largest_surprisal",
    "rollout_max",
    "rollout_minus_min",
    "trainer_max",
    "trainer_minus_min",
    *(f"{column}_placeholder_{end}" for column in COLUMNS for end in ("max", "minus_min")),
    "max_temperature",
    "minus_min_temperature",
    "minus_min_top_p",
    "minus_min_top_k",
    "max_min_p",
    "max_clip_low",
    "max_clip_high",
)


EXAMPLES_KEPT = 3  # per check
# Example names for the values found in place of a log-prob: 0 and constants such as −3.
NO_MU_VALUES, NO_PI_VALUES = "values of no_mu", "values of no log π"


@dataclass(slots=True)
class EvidenceBuilder:
    """COUNTS, SUMS and EXTREMES by name, and up to EXAMPLES_KEPT examples of each check.

    `constants` holds the constants among the generated tokens of each column, [C].
    """

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    extremes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXTREMES, -math.inf))
    examples: dict[str, list[Example]] = field(default_factory=dict)
    constants: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def count(self, **numbers: int) -> None:
        """Add to counts."""
        counts = self.counts
        for name, number in numbers.items():
            counts[name] += int(number)

    def add(self, **numbers: float) -> None:
        """Add to sums."""
        for name, number in numbers.items():
            self.sums[name] += float(number)

    def raise_extremes(self, values: Mapping[str, float]) -> None:
        """Raise each extreme to its value if that is larger; NaN is ignored."""
        for name, value in values.items():
            if value > self.extremes[name]:
                self.extremes[name] = float(value)

    def has_room(self, check: str) -> bool:
        """Return True if the check has fewer than EXAMPLES_KEPT examples."""
        return len(self.examples.get(check, ())) < EXAMPLES_KEPT

    def add_example(self, check: str, example: Example) -> None:
        """Keep an example of a check, if there is room."""
        if self.has_room(check):
            self.examples.setdefault(check, []).append(example)


Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class KeyedSums:
    """Counts [K, C] and sums [K, S] by ascending keys [K]; COUNTS and SUMS name the columns."""

    COUNTS: ClassVar[tuple[str, ...]] = ()
    SUMS: ClassVar[tuple[str, ...]] = ()

    keys: NDArray[Any]
    counts: Ints
    sums: CompensatedSums

    @classmethod
    def of(cls, keys: NDArray[Any], counts: NDArray[Any], sums: NDArray[np.float64] | None = None) -> Self:
        """Return the table of these keys [K], counts [K, C] and sums [K, S]."""
        values = np.zeros((keys.size, len(cls.SUMS))) if sums is None else sums.reshape(keys.size, len(cls.SUMS))
        counts = np.asarray(counts, np.int64).reshape(keys.size, len(cls.COUNTS))
        return cls(keys, counts, CompensatedSums(values, np.zeros_like(values)))

    @classmethod
    def empty(cls) -> Self:
        """Return an empty table."""
        return cls.of(np.zeros(0, np.int64), np.zeros(0))

    def merge(self, other: Self) -> Self:
        """Return the keys of both; counts and sums of a common key are added."""
        union = np.union1d(self.keys, other.keys)
        merged = self.of(union, np.zeros((union.size, len(self.COUNTS))))
        for part in (self, other):
            slots = np.searchsorted(union, part.keys)
            merged.counts[slots] += part.counts
            merged.sums.add_rows(slots, part.sums)
        return merged

    def rows(self, chosen: NDArray[Any]) -> Self:
        """Return the chosen rows."""
        sums = CompensatedSums(self.sums.high[chosen], self.sums.low[chosen])
        return type(self)(self.keys[chosen], self.counts[chosen], sums)

    def row(self, index: int) -> dict[str, float]:
        """Return the counts and sums of a row by name."""
        values = (*self.counts[index].tolist(), *self.sums.value[index].tolist())
        return dict(zip((*self.COUNTS, *self.SUMS), values, strict=True))


class GroupSums(KeyedSums):
    """Sums over the tokens of G prompt groups; a rollout without a group is a group of its own.

    `tokens` counts the tokens with two log-probs; the sums are Σ(−log μ − H) in nats, Σ(ρ − 1), and Σ k3 in nats.
    """

    __slots__ = ()
    COUNTS = ("tokens",)
    SUMS = ("surprisal", "ratio_minus_one", "k3")

    @classmethod
    def of_rollouts(cls, keys: Keys, tokens: Ints, sums: NDArray[np.float64]) -> Self:
        """Return the sums by group of N rollouts with these group keys [N], tokens [N] and sums [N, 3]."""
        unique, inverse = np.unique(keys, return_inverse=True)
        totals = np.zeros((unique.size, len(cls.SUMS)))
        np.add.at(totals, inverse, sums)
        return cls.of(unique, np.bincount(inverse, tokens, unique.size), totals)

    @property
    def with_tokens(self) -> int:
        """The number of groups with a token."""
        return int((self.counts[:, 0] > 0).sum())

    def z_of_zero(self, column: str) -> float:
        """Return Σ_g S_g / √(Σ_g S_g²), the z score against a mean of 0, clustered by group."""
        values = self.sums.value[:, self.SUMS.index(column)]
        square = float(np.square(values).sum())
        return float(values.sum()) / math.sqrt(square) if 0.0 < square < math.inf else math.nan

    def mean_and_t(self, column: str) -> tuple[float, float]:
        """Return the token mean and its Student's t against 0, clustered by group; NaN if not estimable."""
        values = self.sums.value[:, self.SUMS.index(column)]
        tokens = self.counts[:, 0]
        total = int(tokens.sum())
        groups = self.with_tokens
        if total == 0:
            return math.nan, math.nan
        mean = float(values.sum()) / total
        square = float(np.square(values - mean * tokens).sum())
        if groups < 2 or not math.isfinite(square):
            return mean, math.nan
        error = math.sqrt(square * groups / (groups - 1)) / total
        if error == 0.0:
            return mean, math.copysign(math.inf, mean) if mean else 0.0
        return mean, mean / error


def keys_of_groups(group_ids: Sequence[str | None], sample_ids: Sequence[str]) -> Keys:
    """Return the key of each rollout's prompt group, shape [N]; a rollout without a group is a group of its own."""
    names = [
        f"group {group}" if group is not None else f"rollout {sample_id}"
        for group, sample_id in zip(group_ids, sample_ids, strict=True)
    ]
    return keys_of_texts(names)


_PIECE_TOKENS = 1 << 17

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive rollouts of a batch from `first_row` on, with the columns of their T generated tokens, [T] each.

    Rollout i of the piece has the tokens `offsets[i]` to `offsets[i + 1]`. `places` [T] are the positions of the tokens
    in the batch; None if they are consecutive from `start`.
    """

    first_row: int
    start: int
    offsets: NDArray[np.int64]
    rollout: Floats | None
    trainer: Floats | None
    entropy: Floats | None
    places: NDArray[np.int64] | None = None

    @property
    def tokens(self) -> int:
        """T, the generated tokens of the piece."""
        return int(self.offsets[-1])

    def column(self, name: str) -> Floats | None:
        """Return `rollout`, `trainer` or `entropy` by name, shape [T]."""
        values: Floats | None = getattr(self, name)
        return values

    def place(self, index: int) -> int:
        """Return the position in the batch of a token of this piece."""
        return self.start + index if self.places is None else int(self.places[index])

    def select(self, keep: NDArray[np.bool_]) -> Piece:
        """Return a piece of the tokens at which `keep` [T] is True; the piece itself if all are."""
        if keep.all():
            return self
        chosen = np.flatnonzero(keep)
        columns = {
            name: None if values is None else values[chosen]
            for name, values in (("rollout", self.rollout), ("trainer", self.trainer), ("entropy", self.entropy))
        }
        places = chosen + self.start if self.places is None else self.places[chosen]
        return Piece(self.first_row, self.start, np.searchsorted(chosen, self.offsets), places=places, **columns)


def iterate_pieces(batch: RolloutBatch) -> Iterator[Piece]:
    """Yield the generated tokens of the batch in pieces, in order."""
    offsets = batch.response_offsets
    for row, end_row in row_ranges(offsets, _PIECE_TOKENS):
        start, end = int(offsets[row]), int(offsets[end_row])
        piece = Piece(
            row,
            start,
            offsets[row : end_row + 1] - start,
            _part(batch.rollout_log_probs, start, end),
            _part(batch.trainer_log_probs, start, end),
            _part(batch.entropy, start, end),
        )
        yield piece if batch.response_mask is None else piece.select(batch.response_mask[start:end] != 0)


def _part(values: Floats | None, start: int, end: int) -> Floats | None:
    return None if values is None else values[start:end]
