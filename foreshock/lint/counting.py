"""What the checks count: numbers and tables that add up over shards, and the batch as the checks see it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.api.steps import LintExampleRecord
from foreshock.lint.constants import constants_among
from foreshock.measures.statistics.clusters import keys_of_texts
from foreshock.rollouts.arrays import row_of_position, row_ranges
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import LARGEST_LOG_PROB, LEAST_LOG_PROB, are_log_probs

if TYPE_CHECKING:
    from foreshock.measures.comparison import StepMeasurement

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
# The two columns of log-probs, rollout_log_probs (log μ) and trainer_log_probs (log π).
COLUMNS = {"rollout": "rollout_log_probs", "trainer": "trainer_log_probs"}
EXAMPLES_KEPT = 3  # per check
# d is cut off here, which keeps sums of ρ finite; ρ = e^20 already moves any mean.
LARGEST_D = 20.0
_PIECE_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True, order=True)
class Example:
    """One place of a warning: a rollout, optionally a token (counted from 0), and the values there."""

    sample_id: str
    token: int = -1  # −1: the rollout as a whole
    text: str = ""

    def record(self) -> LintExampleRecord:
        """Return the record to show."""
        token = self.token if self.token >= 0 else None
        return LintExampleRecord(sample_id=self.sample_id, token=token, text=self.text)


def largest() -> float:
    """Return a field of Counts that takes the larger value over shards; a minimum is stored negated."""
    value: float = field(default=-math.inf, metadata={"merge": max})
    return value


@dataclass
class Counts:
    """The counts of a check over rollouts: a dataclass of numbers and tables that start at 0.

    Over shards the fields add up; those of `largest()` take the larger value. Every subclass that is not `abstract` is
    counted and stored.
    """

    kinds: ClassVar[list[type[Counts]]] = []

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        if not abstract:
            Counts.kinds.append(cls)

    def add_piece(self, piece: Piece, counting: Counting) -> None:
        """Count the generated tokens of some rollouts."""

    def add_batch(self, counting: Counting) -> None:
        """Count the batch as a whole, after its pieces."""

    def merge(self, other: Self) -> Self:
        """Return the counts over the rollouts of both."""
        merged = type(self)()
        for each in fields(self):
            of_both = each.metadata.get("merge", add)(getattr(self, each.name), getattr(other, each.name))
            setattr(merged, each.name, of_both)
        return merged

    def across_steps(self) -> Self:
        """Return the counts without what is compared only within a step."""
        return self

    def of_sample(self, measured: StepMeasurement) -> Self:
        """Return the counts of a sample, completed with what `measured` knows about all rollouts."""
        return self


class Table:
    """Numbers by key: `values` [K, C] of COLUMNS, by ascending `keys` [K].

    Rows with equal keys add up, except for the last LARGEST columns, which take the larger value.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    LARGEST: ClassVar[int] = 0
    KEY_SHAPE: ClassVar[tuple[Any, ...]] = (None,)

    def __init__(self, keys: Keys | None = None, values: NDArray[np.float64] | None = None) -> None:
        self.keys = np.zeros((0, *self.KEY_SHAPE[1:]), np.uint64) if keys is None else keys
        self.values = np.zeros((0, len(self.COLUMNS))) if values is None else values

    @classmethod
    def of(cls, keys: NDArray[Any], *columns: NDArray[Any]) -> Self:
        """Return the table of N rows with these keys [N] and columns [N] each."""
        return cls._of_rows(np.asarray(keys, np.uint64), np.stack(columns, axis=1).astype(np.float64))

    @classmethod
    def _of_rows(cls, keys: Keys, rows: NDArray[np.float64]) -> Self:
        unique, inverse = np.unique(keys, return_inverse=True)
        values = np.full((unique.size, len(cls.COLUMNS)), -np.inf)
        for column in range(len(cls.COLUMNS)):
            if column < len(cls.COLUMNS) - cls.LARGEST:
                values[:, column] = np.bincount(inverse, rows[:, column], unique.size)
            else:
                np.maximum.at(values[:, column], inverse, rows[:, column])
        return cls(unique, values)

    def __add__(self, other: Self) -> Self:
        """Return the rows of both."""
        if not self.keys.size or not other.keys.size:
            return other if other.keys.size else self
        return self._of_rows(np.concatenate([self.keys, other.keys]), np.concatenate([self.values, other.values]))

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one of COLUMNS, [K]."""
        values: NDArray[np.float64] = self.values[:, self.COLUMNS.index(name)]
        return values

    def rows(self, chosen: NDArray[Any]) -> Self:
        """Return the chosen rows."""
        return type(self)(self.keys[chosen], self.values[chosen])


@dataclass(eq=False)
class Piece:
    """Consecutive rollouts of a batch from `first_row` on, with the columns of their T generated tokens, [T] each.

    Rollout i of the piece has the tokens `offsets[i]` to `offsets[i + 1]`. `places` [T] are the positions of the tokens
    in the batch; None if they are consecutive from `start`.
    """

    first_row: int
    start: int
    offsets: Ints
    rollout: Floats | None
    trainer: Floats | None
    entropy: Floats | None
    places: Ints | None = None

    @property
    def tokens(self) -> int:
        """T, the generated tokens of the piece."""
        return int(self.offsets[-1])

    @property
    def rows(self) -> slice:
        """The rows of the rollouts in the batch."""
        return slice(self.first_row, self.first_row + self.offsets.size - 1)

    def column(self, name: str) -> Floats | None:
        """Return `rollout`, `trainer` or `entropy` by name, shape [T]."""
        values: Floats | None = getattr(self, name)
        return values

    def place(self, index: int) -> int:
        """Return the position in the batch of a token of this piece."""
        return self.start + index if self.places is None else int(self.places[index])

    def select(self, keep: Bools | None) -> Piece:
        """Return a piece of the tokens at which `keep` [T] is True; the piece itself if all are, or if it is None."""
        if keep is None or keep.all():
            return self
        chosen = np.flatnonzero(keep)
        columns = {
            name: None if (values := self.column(name)) is None else values[chosen]
            for name in ("rollout", "trainer", "entropy")
        }
        places = chosen + self.start if self.places is None else self.places[chosen]
        return Piece(self.first_row, self.start, np.searchsorted(chosen, self.offsets), places=places, **columns)

    @cached_property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """The least and the largest value of each column of log-probs; NaN if one is NaN."""
        columns = {name: self.column(name) for name in COLUMNS}
        return {
            name: (float(np.minimum.reduce(values)), float(np.maximum.reduce(values)))
            for name, values in columns.items()
            if values is not None and values.size
        }

    def valid(self, name: str) -> Bools | None:
        """Return True for each log-prob of a column that a sampled token can have, [T]; None if all are."""
        values, (least, most) = self.column(name), self.bounds.get(name, (0.0, 0.0))
        # Two reductions are enough for a valid column: NaN, ±inf and placeholders show in min() or max().
        return (
            None if values is None or (least >= LEAST_LOG_PROB and most <= LARGEST_LOG_PROB) else are_log_probs(values)
        )

    @property
    def scored(self) -> Piece:
        """The tokens with a valid log μ."""
        return self._scored or self

    @property
    def pairs(self) -> Piece:
        """The tokens with a valid log μ and a valid log π."""
        return self._pairs or self

    # None stands for the piece itself: an object that holds itself keeps the batch until the garbage collector runs.
    @cached_property
    def _scored(self) -> Piece | None:
        chosen = self.select(self.valid("rollout"))
        return None if chosen is self else chosen

    @cached_property
    def _pairs(self) -> Piece | None:
        masks = [mask for name in COLUMNS if (mask := self.valid(name)) is not None]
        chosen = self.select(np.logical_and.reduce(masks)) if masks else self
        return None if chosen is self else chosen

    @cached_property
    def d(self) -> Floats | None:
        """log π − log μ of each token, [T]; None if one of them was not logged."""
        return None if self.rollout is None or self.trainer is None else self.trainer - self.rollout

    @cached_property
    def ratio_minus_one(self) -> NDArray[np.float64] | None:
        """ρ − 1 of each token, [T]; None if a log-prob was not logged."""
        # Not in float32: there expm1 rounds differently on CPUs with and without AVX-512.
        return None if self.d is None else np.expm1(np.minimum(self.d, np.float32(LARGEST_D)), dtype=np.float64)


class Counting:
    """A batch that is being counted, and the examples of each check."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.batch = batch
        self.examples: dict[str, list[Example]] = {}

    @cached_property
    def constants(self) -> Mapping[str, Floats]:
        """The constants among the generated tokens of each column of log-probs, [C]."""
        return {name: constants_among(getattr(self.batch, field), self.batch) for name, field in COLUMNS.items()}

    @cached_property
    def group_keys(self) -> Keys:
        """The key of each rollout's prompt group, [N]."""
        return keys_of_groups(self.batch.group_ids or [None] * self.batch.num_rollouts, self.batch.sample_ids)

    def has_room(self, check: str) -> bool:
        """Return True if the check has fewer than EXAMPLES_KEPT examples."""
        return len(self.examples.get(check, ())) < EXAMPLES_KEPT

    def add_example(self, check: str, example: Example) -> None:
        """Keep an example of a check, if there is room."""
        if self.has_room(check):
            self.examples.setdefault(check, []).append(example)

    def add_token(self, check: str, place: int, text: str) -> None:
        """Keep a token as an example; `place` is its position in the flat columns of the batch."""
        row = row_of_position(self.batch.response_offsets, place)
        self.add_example(
            check, Example(self.batch.sample_ids[row], place - int(self.batch.response_offsets[row]), text)
        )

    def pieces(self) -> Iterator[Piece]:
        """Yield the generated tokens of the batch in pieces, in order."""
        batch = self.batch
        columns = (batch.rollout_log_probs, batch.trainer_log_probs, batch.entropy)
        for row, end_row in row_ranges(batch.response_offsets, _PIECE_TOKENS):
            start, end = int(batch.response_offsets[row]), int(batch.response_offsets[end_row])
            offsets = batch.response_offsets[row : end_row + 1] - start
            rollout, trainer, entropy = (None if each is None else each[start:end] for each in columns)
            piece = Piece(row, start, offsets, rollout, trainer, entropy)
            yield piece.select(None if batch.response_mask is None else batch.response_mask[start:end] != 0)


def keys_of_groups(group_ids: Sequence[str | None], sample_ids: Sequence[str]) -> Keys:
    """Return the key of each rollout's prompt group, shape [N]; a rollout without a group is a group of its own."""
    names = [
        f"group {group}" if group is not None else f"rollout {sample_id}"
        for group, sample_id in zip(group_ids, sample_ids, strict=True)
    ]
    return keys_of_texts(names)
