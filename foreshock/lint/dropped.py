"""Evidence about tokens that are half there: sampled, and without a log π; or masked, and with a real log μ.

A model may sample its padding id like any other token. A trainer that makes its mask from `id != pad` then drops that
token, and often shifts or blinds what follows it. Such ids are found from the data: every occurrence of one id is hit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.report import Example
from foreshock.lint.tables import DroppedIds
from foreshock.lint.tally import Tally
from foreshock.lint.values import example_at
from foreshock.rollouts.batch import RolloutBatch

__all__ = ["REAL", "count_masked", "dropped_ids"]

# A log μ below this is that of an uncertain token, whose log π cannot be 0: not even where the trainer sharpens.
REAL = -0.5

Places = NDArray[np.int64]


def count_masked(batch: RolloutBatch, tally: Tally) -> None:
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
        tally.count(**{f"masked_{name}": carried.size})
        if name in ("rollout", "advantage"):
            for place in carried[:2].tolist():
                what = f"{name} log-prob" if name == "rollout" else name
                tally.example("masked_values", example_at(batch, place, f"{what} {values[place]:.4g}, mask 0"))


def dropped_ids(batch: RolloutBatch, tally: Tally) -> DroppedIds:
    """The token ids that lost log-probs while log μ says that they were sampled."""
    behaviour = batch.rollout_log_probs
    if behaviour is None:
        return DroppedIds.empty()
    without_target, masked = _without_target(batch), _masked(batch)
    without_target = without_target[_is_real(behaviour[without_target])]
    # Any log μ at a masked token says that it was sampled.
    masked = masked[_carries(behaviour[masked])]
    if without_target.size == 0 and masked.size == 0:
        return DroppedIds.empty()
    ids = np.union1d(batch.response_token_ids[without_target], batch.response_token_ids[masked])
    counts = np.zeros((ids.size, 3), np.int64)
    concerned = np.flatnonzero(np.isin(batch.response_token_ids, ids))
    concerned = concerned[_is_real(behaviour[concerned]) | np.isin(concerned, masked, assume_unique=True)]
    tally.count(
        dropped_first=int(np.isin(without_target, batch.response_offsets[:-1]).sum()),
        dropped_last=int(np.isin(without_target, batch.response_offsets[1:] - 1).sum()),
    )
    for column, places in enumerate((without_target, masked, concerned)):
        slots = np.searchsorted(ids, batch.response_token_ids[places])
        counts[:, column] = np.bincount(slots, minlength=ids.size)
    _note_examples(batch, ids, counts, (without_target, masked), tally)
    return DroppedIds.of(ids.astype(np.int64), counts)


def _note_examples(
    batch: RolloutBatch, ids: NDArray[np.integer], counts: Places, found: tuple[Places, Places], tally: Tally
) -> None:
    """Examples of the id that lost most, and of lost log π whatever the id."""
    for column, (places, what) in enumerate(zip(found, ("no log π", "mask 0"), strict=True)):
        most = ids[counts[:, column].argmax()]
        for place in places[batch.response_token_ids[places] == most][:3].tolist():
            tally.example("pad_id_sampled", _example(batch, place, what))
    for place in found[0][:3].tolist():
        tally.example("tokens_without_trainer", _example(batch, place, "no log π"))


def _without_target(batch: RolloutBatch) -> Places:
    """Generated tokens whose log π is 0, NaN or −inf."""
    target = batch.trainer_log_probs
    if target is None:
        return np.zeros(0, np.int64)
    lost = target == 0
    # NaN and −inf come through the least value: where it is finite there are none.
    if target.size and not np.isfinite(target.min()):
        lost |= np.isnan(target) | np.isneginf(target)
    if batch.response_mask is not None:
        lost &= batch.response_mask != 0
    return np.flatnonzero(lost)


def _masked(batch: RolloutBatch) -> Places:
    return np.zeros(0, np.int64) if batch.response_mask is None else np.flatnonzero(batch.response_mask == 0)


def _is_real(behaviour: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(behaviour) & (behaviour < np.float32(REAL)))


def _carries(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(values) & (values != 0))


def _example(batch: RolloutBatch, place: int, what: str) -> Example:
    assert batch.rollout_log_probs is not None
    text = f"id {batch.response_token_ids[place]}, log μ {batch.rollout_log_probs[place]:.4g}, {what}"
    return example_at(batch, place, text)
