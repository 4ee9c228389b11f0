"""Find constants in place of log-probs, such as −3.0 at tool tokens: written by a program, not by a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

Floats = NDArray[np.float32]

# Even samples: of all tokens, and of those whose log-probs are not near 0.
_MOST_SAMPLED, _SAMPLE = 1 << 16, 4096
# Nearer to 0, log-probs of certain tokens are multiples of a coarse step and repeat by chance.
_LEAST_SIZE = 0.01
# A real log-prob repeats only for one prompt and one id; 16-bit log-probs repeat all values about equally often.
_LEAST_REPEATED, _LEAST_IDS, _LEAST_SHARE = 4, 3, 0.005
_TIMES_OF_OTHERS, _OTHERS = 4, 4
# A policy that is uniform over its ids also gives a single value.
_MOST_SHARE = 0.9
_MASKED_SHARE = 0.9


def constants_among(values: Floats | None, batch: RolloutBatch) -> Floats:
    """Return the constants [C] among the generated tokens of a column [T] of log-probs.

    A constant has up to three decimal digits, which values of a softmax have only by chance. It stands at several ids,
    and is far more frequent than other values at several ids.
    """
    if values is None or values.size == 0:
        return np.zeros(0, np.float32)
    stride = max(1, values.size // _MOST_SAMPLED)
    sample = values[::stride]
    chosen = are_log_probs(sample) & (np.abs(sample) > _LEAST_SIZE)
    if batch.response_mask is not None:
        chosen &= batch.response_mask[::stride] != 0
    places = np.flatnonzero(chosen) * stride
    places = places[:: max(1, places.size // _SAMPLE)]
    unique, inverse, counts = np.unique(values[places], return_inverse=True, return_counts=True)
    if not counts.size or counts.max() < max(_LEAST_REPEATED, _LEAST_SHARE * places.size):
        return np.zeros(0, np.float32)
    ids_of_values = np.unique((inverse.astype(np.int64) << 32) + batch.response_token_ids[places]) >> 32
    several = np.where(np.bincount(ids_of_values, minlength=unique.size) >= _LEAST_IDS, counts, 0)
    others = np.sort(several)[::-1][_OTHERS] if several.size > _OTHERS else 0
    frequent = several >= max(_LEAST_REPEATED, _LEAST_SHARE * places.size, _TIMES_OF_OTHERS * others)
    found = unique[frequent]
    found = found[_are_short_decimals(found)]
    return found if np.isin(values[places], found).mean() < _MOST_SHARE else np.zeros(0, np.float32)


def constant_of_masked(values: Floats) -> Floats:
    """Return the constant, shape [1], that nearly all values [M] at masked tokens equal; shape [0] if they differ."""
    sample = values[:: max(1, values.size // _SAMPLE)]
    known = sample[are_log_probs(sample) & (np.abs(sample) > _LEAST_SIZE)]
    unique, counts = np.unique(known, return_counts=True)
    found = unique[counts >= max(_LEAST_REPEATED, _MASKED_SHARE * known.size)]
    return found[_are_short_decimals(found)]


def _are_short_decimals(values: Floats) -> NDArray[np.bool_]:
    """Return True for each number that has up to three decimal digits."""
    return np.array([np.float32(f"{value:.3g}") == value for value in values.tolist()], np.bool_)
