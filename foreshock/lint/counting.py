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


def largest() -> float:
    """Return a field of Counts that takes the larger value over shards; a minimum is stored negated."""
    value: float = field(default=-math.inf, metadata={"merge": max})
    return value


@dataclass
class Counts:
    """The counts of a check over rollouts: a dataclass of numbers and tables that start at 0.

    Over shards the fields add up; those of `largest()` take the larger value. Every subclass that is not `abstract` is
    counted and stored. What is `within_step` is compared only within a step.
    """

    kinds: ClassVar[list[type[Counts]]] = []
    _within_step: ClassVar[bool] = False

    def __init_subclass__(cls, *, abstract: bool = False, within_step: bool = False) -> None:
        cls._within_step = within_step
        if not abstract:
            Counts.kinds.append(cls)

    def add_piece(self, piece: Piece, counting: Counting) -> None:
        """Count the generated tokens of some rollouts."""

    def add_pairs(self, pairs: TokenPairs, counting: Counting) -> None:
        """Count the generated tokens of some rollouts that have two valid log-probs."""

    def add_batch(self, counting: Counting) -> None:
        """Count the batch as a whole, after its pieces."""

    def add(self, **values: Any) -> None:
        """Add a number or a table to each named field; of an array its sum, which counts what is True."""
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                value = int(np.count_nonzero(value)) if value.dtype == np.bool_ else value.sum(dtype=np.float64).item()
            merge = self.__dataclass_fields__[name].metadata.get("merge", add)
            setattr(self, name, merge(getattr(self, name), value))

    def merge(self, other: Self) -> Self:
        """Return the counts over the rollouts of both."""
        merged = type(self)()
        for part in (self, other):
            merged.add(**{each.name: getattr(part, each.name) for each in fields(part)})
        return merged

    def across_steps(self) -> Self:
        """Return the counts without what is compared only within a step."""
        return type(self)() if self._within_step else self

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
    def of(cls, keys: NDArray[Any], *columns: NDArray[Any] | float) -> Self:
        """Return the table of N rows with these keys [N] and columns, [N] or one number for all."""
        rows = np.empty((len(keys), len(columns)))
        for place, column in enumerate(columns):
            rows[:, place] = column
        return cls._of_rows(np.asarray(keys, np.uint64), rows)

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
    """Consecutive rollouts of a batch, its `rows`, with the columns of their T generated tokens, [T] each.

    Rollout i of the piece has the tokens `offsets[i]` to `offsets[i + 1]`; `places` are their positions in the batch.
    """

    rows: slice
    offsets: Ints
    places: Ints
    columns: Mapping[str, Floats]  # those of `rollout`, `trainer` and `entropy` that were logged

    def select(self, keep: Bools | None) -> Piece:
        """Return a piece of the tokens at which `keep` [T] is True; the piece itself if all are, or if it is None."""
        if keep is None or keep.all():
            return self
        chosen = np.flatnonzero(keep)
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return Piece(self.rows, np.searchsorted(chosen, self.offsets), self.places[chosen], columns)

    @cached_property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """The least and the largest value of each column of log-probs; NaN if one is NaN."""
        logged = {name: self.columns[name] for name in COLUMNS if name in self.columns}
        return {name: (float(np.minimum.reduce(of)), float(np.maximum.reduce(of))) for name, of in logged.items()}

    def valid(self, name: str) -> Bools | None:
        """Return True for each log-prob of a column that a sampled token can have, [T]; None if all are."""
        least, most = self.bounds.get(name, (0.0, 0.0))
        # Two reductions are enough for a valid column: NaN, ±inf and placeholders show in min() or max().
        return None if least >= LEAST_LOG_PROB and most <= LARGEST_LOG_PROB else are_log_probs(self.columns[name])

    def pairs(self) -> TokenPairs | None:
        """Return the tokens with two valid log-probs; None without any."""
        if len(self.bounds) < len(COLUMNS):
            return None
        masks = [mask for name in COLUMNS if (mask := self.valid(name)) is not None]
        chosen = self.select(np.logical_and.reduce(masks) if masks else None)
        if not chosen.places.size:
            return None
        mu, pi = chosen.columns["rollout"], chosen.columns["trainer"]
        d = pi - mu
        # Not in float32: there expm1 rounds differently on CPUs with and without AVX-512.
        ratio_minus_one = np.expm1(np.minimum(d, np.float32(LARGEST_D)), dtype=np.float64)
        entropy = chosen.columns.get("entropy")
        return TokenPairs(chosen.rows, chosen.offsets, chosen.places, mu, pi, d, ratio_minus_one, entropy)


@dataclass(frozen=True, slots=True, eq=False)
class TokenPairs:
    """The T tokens of a piece with two valid log-probs, with d = log π − log μ and ρ − 1, [T] each."""

    rows: slice
    offsets: Ints
    places: Ints
    mu: Floats
    pi: Floats
    d: Floats
    ratio_minus_one: NDArray[np.float64]
    entropy: Floats | None


class Counting:
    """A batch that is being counted, and the examples of each check."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.batch = batch
        self.examples: dict[str, list[LintExampleRecord]] = {}

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

    def add_example(self, check: str, sample_id: str, token: int | None = None, text: str = "") -> None:
        """Keep a rollout, or one of its tokens counted from 0, as an example of a check, if there is room."""
        if self.has_room(check):
            example = LintExampleRecord(sample_id=_storable(sample_id), token=token, text=_storable(text))
            self.examples.setdefault(check, []).append(example)

    def add_token(self, check: str, place: int | np.integer, text: str) -> None:
        """Keep a token as an example; `place` is its position in the flat columns of the batch."""
        row = row_of_position(self.batch.response_offsets, int(place))
        self.add_example(check, self.batch.sample_ids[row], int(place - self.batch.response_offsets[row]), text)

    def pieces(self) -> Iterator[Piece]:
        """Yield the generated tokens of the batch in pieces, in order, without empty ones."""
        batch = self.batch
        columns = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs, "entropy": batch.entropy}
        for row, end_row in row_ranges(batch.response_offsets, _PIECE_TOKENS):
            start, end = int(batch.response_offsets[row]), int(batch.response_offsets[end_row])
            offsets = batch.response_offsets[row : end_row + 1] - start
            of_piece = {name: values[start:end] for name, values in columns.items() if values is not None}
            whole = Piece(slice(row, end_row), offsets, np.arange(start, end), of_piece)
            piece = whole.select(None if batch.response_mask is None else batch.response_mask[start:end] != 0)
            if piece.places.size:
                yield piece


def keys_of_groups(group_ids: Sequence[str | None], sample_ids: Sequence[str]) -> Keys:
    """Return the key of each rollout's prompt group, shape [N]; a rollout without a group is a group of its own."""
    names = [
        f"group {group}" if group is not None else f"rollout {sample_id}"
        for group, sample_id in zip(group_ids, sample_ids, strict=True)
    ]
    return keys_of_texts(names)


def _storable(text: str) -> str:
    """Return the text without NUL characters, which PostgreSQL refuses, and as valid UTF-8."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
