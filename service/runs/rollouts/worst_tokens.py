"""The order in which the row groups of a step are read for its worst tokens, and when the rest is not read.

The summary of a rollout has its smallest and largest d, so that it bounds |d| of each of its tokens. Row groups are
read from the largest bound down, one at a time, until no other can hold a token as bad as the worst that were found.
Without summaries of the comparison all row groups are read, still one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from sqlalchemy.orm import Session

from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.parquet_files import RolloutFile
from foreshock_service.platform.context import ServiceContext
from foreshock_service.platform.decoding.worker import stored_limits
from foreshock_service.platform.store.reading import stored_file
from foreshock_service.runs.measurements.service import summaries_of_steps
from foreshock_service.runs.rollouts.chosen_tokens import TOKEN_COLUMNS, ChosenTokens
from foreshock_service.runs.rollouts.repository import StoredTokens
from foreshock_service.runs.step_key import StepKey

# The scores that rollouts come with. Replayed ones may be newer than their summaries.
_LOGGED = frozenset({"rollout", "trainer"})
# Sums of log-probs are taken in another order than differences of single tokens.
_ROUNDING = 1e-9


def read_worst_first(
    context: ServiceContext,
    key: StepKey,
    files: Sequence[StoredTokens],
    bounds: Mapping[str, float],
    so_far: ChosenTokens,
) -> Iterator[tuple[tuple[int, int], RolloutBatch]]:
    """Yield ((shard, row group), rollouts) until no other row group can add to `so_far`.

    `bounds` has the largest |d| of rollouts by sample id; of others it is unknown. Raises TokensGone, TokensDamaged.
    """
    opened: dict[int, RolloutFile] = {}
    order: list[tuple[float, int, int]] = []
    for file in files:
        with stored_file(f"shard {file.shard} of step {key.step}"):
            opened[file.shard] = RolloutFile(context.store.file(file.file), stored_limits(), only=TOKEN_COLUMNS)
        for group, names in enumerate(opened[file.shard].sample_ids):
            bound = max((bounds.get(name, math.inf) for name in names), default=-math.inf)
            order.append((-bound, file.shard, group))
    for place, (negative_bound, shard, group) in enumerate(sorted(order)):
        # The first is read in any case: its columns say which scores there are.
        if place and -negative_bound < so_far.least:
            return
        with stored_file(f"shard {shard} of step {key.step}"):
            batch = opened[shard].read(group)
        yield (shard, group), batch


def bounds_of_rollouts(session: Session, key: StepKey, comparison: str) -> dict[str, float]:
    """Return at most how large |d| of a token of each rollout is, by sample id, for those whose summary says it."""
    if not _LOGGED.issuperset(comparison.split("/")):
        return {}
    stored = summaries_of_steps(session, [key], comparison).get(key)
    if stored is None:
        return {}
    summaries = RolloutSummaries.from_bytes(stored)
    sizes = np.fmax(np.abs(summaries.column("min_d")), np.abs(summaries.column("max_d")))
    # Without a measured token there is nothing that could be among the worst.
    sizes = np.where(np.isnan(sizes), -math.inf, sizes * (1.0 + _ROUNDING) + _ROUNDING)
    bounds: dict[str, float] = {}
    for name, size in zip(summaries.table.column("sample_id").to_pylist(), sizes.tolist(), strict=True):
        # Two shards may have rollouts of the same name.
        bounds[name] = max(size, bounds.get(name, -math.inf))
    return bounds
