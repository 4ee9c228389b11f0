"""Count tokens with one log-prob missing, by token id: sampled ones without a log π, and masked ones with a log μ.

A model may sample its padding id like any other token. A trainer that makes its mask from `id != pad` drops that token.
Such an id shows in the data: every occurrence of it is affected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.lint.evidence.values import example_at
from foreshock.lint.report import Example
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["MissingByTokenId", "count_masked_values", "missing_by_token_id"]

# A log μ below this belongs to an uncertain token, whose log π cannot be 0, even if the trainer sharpens.
_REAL = -0.5
_IDS_KEPT = 256

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MissingByTokenId:
    """Token ids [K] with missing log-probs, and three counts of each, [K, 3].

    The counts are of generated tokens with a real log μ and no log π (0, NaN or −inf); of masked tokens with a log μ;
    and of all tokens of the id that are masked with a log μ or have a real log μ.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> MissingByTokenId:
        """Return the table of the 256 ids with the most missing log-probs."""
        if ids.size > _IDS_KEPT:
            kept = np.sort(np.lexsort((ids, -(counts[:, 0] + counts[:, 1])))[:_IDS_KEPT])
            ids, counts = ids[kept], counts[kept]
        return cls(ids, counts)

    @classmethod
    def empty(cls) -> MissingByTokenId:
        """Return a table without an id."""
        return cls(np.zeros(0, np.int64), np.zeros((0, 3), np.int64))

    def merge(self, other: MissingByTokenId) -> MissingByTokenId:
        """Return the sum of both tables."""
        union = np.union1d(self.ids, other.ids)
        counts = np.zeros((union.size, 3), np.int64)
        for part in (self, other):
            counts[np.searchsorted(union, part.ids)] += part.counts
        return MissingByTokenId.of(union, counts)


def count_masked_values(batch: RolloutBatch, builder: EvidenceBuilder) -> None:
    """Count masked tokens that carry a log-prob, an entropy or an advantage other than 0."""
    if batch.response_mask is None:
        return
    masked = np.flatnonzero(batch.response_mask == 0)
    if masked.size == 0:
        return
    columns = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs, "entropy": batch.entropy}
    if batch.advantage_per_token:
        columns["advantage"] = batch.advantage
    for name, values in columns.items():
        if values is None:
            continue
        carried = masked[_carries(values[masked])]
        builder.count(**{f"masked_{name}": carried.size})
        if name in ("rollout", "advantage"):
            for place in carried[:2].tolist():
                what = f"{name} log-prob" if name == "rollout" else name
                builder.add_example("masked_values", example_at(batch, place, f"{what} {values[place]:.4g}, mask 0"))


def missing_by_token_id(batch: RolloutBatch, builder: EvidenceBuilder) -> MissingByTokenId:
    """Return the token ids that miss log-probs at tokens which, by their log μ, the model sampled."""
    behaviour = batch.rollout_log_probs
    if behaviour is None:
        return MissingByTokenId.empty()
    without_target, masked = _without_target(batch), _masked(batch)
    without_target = without_target[_is_real(behaviour[without_target])]
    # At a masked token any log μ other than 0 counts.
    masked = masked[_carries(behaviour[masked])]
    if without_target.size == 0 and masked.size == 0:
        return MissingByTokenId.empty()
    ids = np.union1d(batch.response_token_ids[without_target], batch.response_token_ids[masked])
    counts = np.zeros((ids.size, 3), np.int64)
    of_these_ids = np.flatnonzero(np.isin(batch.response_token_ids, ids))
    sampled = of_these_ids[_is_real(behaviour[of_these_ids]) | np.isin(of_these_ids, masked, assume_unique=True)]
    builder.count(
        missing_first=int(np.isin(without_target, batch.response_offsets[:-1]).sum()),
        missing_last=int(np.isin(without_target, batch.response_offsets[1:] - 1).sum()),
        dropped_first=int(np.isin(masked, batch.response_offsets[:-1]).sum()),
        dropped_last=int(np.isin(masked, batch.response_offsets[1:] - 1).sum()),
    )
    for column, places in enumerate((without_target, masked, sampled)):
        slots = np.searchsorted(ids, batch.response_token_ids[places])
        counts[:, column] = np.bincount(slots, minlength=ids.size)
    _add_examples(batch, ids, counts, (without_target, masked), builder)
    return MissingByTokenId.of(ids.astype(np.int64), counts)


def _add_examples(
    batch: RolloutBatch,
    ids: NDArray[np.integer],
    counts: Places,
    found: tuple[Places, Places],
    builder: EvidenceBuilder,
) -> None:
    """Add examples of the id with the most missing log-probs, and of a missing log π at any id."""
    for column, (places, what) in enumerate(zip(found, ("no log π", "mask 0"), strict=True)):
        most = ids[counts[:, column].argmax()]
        for place in places[batch.response_token_ids[places] == most][:3].tolist():
            builder.add_example("pad_id_sampled", _example(batch, place, what))
    for place in found[0][:3].tolist():
        builder.add_example("tokens_without_trainer", _example(batch, place, "no log π"))


def _without_target(batch: RolloutBatch) -> Places:
    """Return the positions of generated tokens whose log π is 0, NaN or −inf."""
    target = batch.trainer_log_probs
    if target is None:
        return np.zeros(0, np.int64)
    missing = target == 0
    # min() is not finite if any value is NaN or −inf, so that most batches need only one pass.
    if target.size and not np.isfinite(target.min()):
        missing |= np.isnan(target) | np.isneginf(target)
    if batch.response_mask is not None:
        missing &= batch.response_mask != 0
    return np.flatnonzero(missing)


def _masked(batch: RolloutBatch) -> Places:
    return np.zeros(0, np.int64) if batch.response_mask is None else np.flatnonzero(batch.response_mask == 0)


def _is_real(behaviour: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(behaviour) & (behaviour < np.float32(_REAL)))


def _carries(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(values) & (values != 0))


def _example(batch: RolloutBatch, place: int, what: str) -> Example:
    assert batch.rollout_log_probs is not None
    text = f"id {batch.response_token_ids[place]}, log μ {batch.rollout_log_probs[place]:.4g}, {what}"
    return example_at(batch, place, text)
