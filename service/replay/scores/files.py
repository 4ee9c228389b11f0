"""Stored score files: read them and line them up with the tokens of rollouts.

These functions know no database; they run in a decoder process too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch, ScoreBatch, decode_scores
from foreshock.rollouts.parquet_row_groups import find_scores
from foreshock.scorers import score_name
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.store.tokens import StoredFile


@dataclass(frozen=True, slots=True)
class ScoreFiles:
    """A published score: its scorer, variant, fingerprint and files."""

    scorer: str
    variant: str
    files: tuple[StoredFile, ...]
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`vllm.prefill`, or `vllm.prefill@rebatched`."""
        return score_name(self.scorer, self.variant)


def read_scores(file: StoredFile) -> ScoreBatch:
    """Return a stored score shard."""
    return decode_scores(file.read_bytes(), stored_limits())


def read_aligned_scores(batch: RolloutBatch, files: Iterable[StoredFile]) -> NDArray[np.float32]:
    """Return the log-probs in `files`, [T] in the order of the batch's response tokens; NaN for unscored rollouts.

    Only the row groups that hold rollouts of the batch are read.
    """
    sample_ids = frozenset(batch.sample_ids)
    found = (find_scores(file, sample_ids, stored_limits()) for file in files)
    return align_scores(batch, [scores for scores in found if scores is not None])


def align_scores(batch: RolloutBatch, shards: Sequence[ScoreBatch]) -> NDArray[np.float32]:
    """Return the log-probs of `shards`, [T] in the order of the batch's response tokens; NaN for unscored rollouts."""
    aligned = np.full(batch.num_tokens, np.nan, dtype=np.float32)
    rows = {sample_id: row for row, sample_id in enumerate(batch.sample_ids)}
    for shard in shards:
        for index, sample_id in enumerate(shard.sample_ids):
            row = rows.get(sample_id)
            if row is not None:
                start, end = batch.response_offsets[row : row + 2]
                aligned[start:end] = shard.log_probs[shard.offsets[index] : shard.offsets[index + 1]]
    return aligned
