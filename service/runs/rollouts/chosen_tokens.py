"""Tokens chosen while the rollouts of a step are read part by part: those of one rollout, or the worst by |d|."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.columnar.table import Column, ColumnTable, Labels

Scores = Mapping[str, NDArray[np.float32]]
LOG_PROB = "log_prob."
TOKEN_COLUMNS = (
    "sample_id", "prompt_token_ids", "response_token_ids", "response_mask", "rollout_log_probs", "trainer_log_probs"
)  # fmt: skip
"""What is read of rollouts to show their tokens."""
# Kept tokens are cut to the worst ones when there are this many times as many as are asked for.
_CUT_AT = 4


class ChosenTokens:
    """Tokens chosen from the rollouts that were read so far; d = log target − log behaviour."""

    def __init__(self, target: str, behaviour: str) -> None:
        self._target, self._behaviour = target, behaviour
        self._kept = 0
        self._worst: NDArray[np.float64] = np.zeros(0)
        self.scorers: set[str] = set()
        self.compared = False
        self.parts: list[tuple[tuple[int, int], dict[str, Any]]] = []
        self.prompt: list[int] = []
        # Every token with a smaller |d| is not among the worst.
        self.least = 0.0

    def add_rollout(self, shard: int, batch: RolloutBatch, scores: Scores, first: int, last: int) -> None:
        """Add the tokens of the one rollout in `batch` at positions `first` … `last`."""
        self.prompt = batch.prompt_token_ids.tolist()
        d = self._difference(scores, batch.num_tokens)
        self._add((shard, 0), batch, scores, d, np.arange(first, min(last + 1, batch.num_tokens)))

    def add_worst(self, place: tuple[int, int], batch: RolloutBatch, scores: Scores, most: int) -> None:
        """Add those tokens of `batch` that may be among the worst; `place` is (shard, row group).

        Of equal |d|, the earlier place and token come first, in whatever order places are added.
        """
        d = self._difference(scores, batch.num_tokens)
        sizes = np.where(np.isfinite(d) & batch.generated, np.abs(d), -1.0)
        positions = largest(sizes, most)
        positions = positions[sizes[positions] >= self.least]
        self._add(place, batch, scores, d, positions)
        self._kept += positions.size
        worst = np.concatenate([self._worst, sizes[positions]])
        self._worst = worst[largest(worst, most)]
        if self._worst.size == most:
            self.least = float(self._worst[-1])
        if self._kept > _CUT_AT * most:
            self._cut()

    def table(self, scorers: Sequence[str]) -> ColumnTable:
        """Return the tokens of all parts in the order of their places, with a column for each of `scorers`."""
        parts = [part for _, part in sorted(self.parts, key=lambda each: each[0])]
        names = [name for part in parts for name in part["sample_id"]]
        codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
        columns: dict[str, Column] = {
            "sample_id": Labels(np.array([codes[name] for name in names], dtype=np.int32), tuple(codes))
        }
        for column in ("shard", "position", "token_id", "generated", "d", *(LOG_PROB + name for name in scorers)):
            columns[column] = np.concatenate([_values(part, column) for part in parts])
        return ColumnTable(columns)

    def _add(
        self,
        place: tuple[int, int],
        batch: RolloutBatch,
        scores: Scores,
        d: NDArray[np.float64],
        positions: NDArray[np.int64],
    ) -> None:
        self.scorers |= scores.keys()
        rows = np.searchsorted(batch.response_offsets, positions, side="right") - 1
        part = {
            "sample_id": [batch.sample_ids[row] for row in rows.tolist()],
            "shard": np.full(positions.size, place[0]),
            "position": positions - batch.response_offsets[rows],
            "token_id": batch.response_token_ids[positions],
            "generated": batch.generated[positions],
            "d": d[positions],
            **{LOG_PROB + name: values[positions] for name, values in scores.items()},
        }
        self.parts.append((place, part))

    def _cut(self) -> None:
        """Drop the tokens below `least`, and the parts that have no others."""
        self.parts = [(place, _rows(part, np.abs(part["d"]) >= self.least)) for place, part in self.parts]
        self.parts = [each for each in self.parts if each[1]["sample_id"]]
        self._kept = sum(len(part["sample_id"]) for _, part in self.parts)

    def _difference(self, scores: Scores, tokens: int) -> NDArray[np.float64]:
        if self._target not in scores or self._behaviour not in scores:
            return np.full(tokens, np.nan)
        self.compared = True
        with np.errstate(invalid="ignore"):
            return scores[self._target].astype(np.float64) - scores[self._behaviour].astype(np.float64)


def largest(sizes: NDArray[np.floating[Any]], most: int) -> NDArray[np.int64]:
    """Return the indices of the `most` largest non-negative sizes, largest first; ties in order of index."""
    at_least = np.partition(sizes, -most)[-most] if most < sizes.size else 0.0
    # Several sizes may equal the smallest one kept; the stable sort keeps the first of them.
    candidates = np.flatnonzero(sizes >= max(at_least, 0.0))
    order = np.argsort(-sizes[candidates], kind="stable")[:most]
    return candidates[order]


def _rows(part: dict[str, Any], kept: NDArray[np.bool_]) -> dict[str, Any]:
    names = [name for name, stays in zip(part["sample_id"], kept.tolist(), strict=True) if stays]
    return {**{name: values[kept] for name, values in part.items() if name != "sample_id"}, "sample_id": names}


def _values(part: dict[str, Any], column: str) -> NDArray[Any]:
    missing: NDArray[Any] = np.full(len(part["sample_id"]), np.nan, dtype=np.float32)
    values: NDArray[Any] = part.get(column, missing)
    return values
