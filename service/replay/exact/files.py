"""Stored files of exact divergences: read them and line them up with the tokens of rollouts.

These functions know no database; they run in a decoder process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from foreshock.measures.exact import ExactMeasures, measure_exact
from foreshock.rollouts import ExactBatch, RolloutBatch, decode_exact
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts, read_rollouts


def read_exact(file: StoredFile) -> ExactBatch:
    """Return a stored shard."""
    return decode_exact(file.read_bytes(), stored_limits())


def align_exact(batch: RolloutBatch, shards: Sequence[ExactBatch]) -> ExactBatch:
    """Return the values of `shards` in the order of the batch's response tokens; NaN for other rollouts.

    There must be at least one shard; the result has the fingerprints of the first.
    """
    names = [field.name for field in fields(ExactBatch) if isinstance(getattr(shards[0], field.name), np.ndarray)]
    names.remove("offsets")
    aligned: dict[str, Any] = {}
    for name in names:
        dtype = getattr(shards[0], name).dtype
        aligned[name] = np.full(batch.num_tokens, np.nan if dtype.kind == "f" else 0, dtype)
    rows = {sample_id: row for row, sample_id in enumerate(batch.sample_ids)}
    for shard in shards:
        for index, sample_id in enumerate(shard.sample_ids):
            row = rows.get(sample_id)
            if row is None:
                continue
            start, end = batch.response_offsets[row : row + 2]
            for name in names:
                aligned[name][start:end] = getattr(shard, name)[shard.offsets[index] : shard.offsets[index + 1]]
    return replace(shards[0], sample_ids=batch.sample_ids, offsets=batch.response_offsets, **aligned)


def measure_files(rollouts: PinnedRollouts, files: Sequence[StoredFile]) -> ExactMeasures:
    """Return the measures of the divergences in `files` over those of the rollouts that they have."""
    shards = [read_exact(file) for file in files]
    batch = read_rollouts(rollouts)
    known = {sample_id for shard in shards for sample_id in shard.sample_ids}
    chosen = batch.select(np.flatnonzero([sample_id in known for sample_id in batch.sample_ids]))
    return measure_exact(align_exact(chosen, shards), chosen.generated, chosen.group_ids)
