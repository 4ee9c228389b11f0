"""Changes of what is logged: shifts, constants, clamps, scales, rounding. They need no replay of their own.

Each function takes the log-probs [T] of a replay and returns those that would have been logged, or None if the logged
ones do not have the mark of this change. NaN leaves a token out. Marked tokens (constants) take the logged value, which
nothing predicts: only the other tokens are judged.
"""

from collections.abc import Callable

import numpy as np

from foreshock.doctor.evidence import Compared, Float64

_CLEARLY = 0.05
"""Least difference in nats of a constant from the replay; below it a token may have that very log-prob."""
_LEAST_REPEATS = 3
_LEAST_LEFT = 0.1
"""Least share of tokens that constants leave to be judged; a value of a whole rollout is no constant of some tokens."""


def shifted(by: int) -> Callable[[Compared, Float64], Float64 | None]:
    """Return the change that logs at each token the log-prob of the token `by` places later in its rollout."""

    def change(compared: Compared, log_probs: Float64) -> Float64 | None:
        found = np.full(log_probs.shape, np.nan)
        tokens = np.arange(log_probs.size)
        inside = (tokens + by >= 0) & (tokens + by < log_probs.size)
        source = np.where(inside, tokens + by, 0)
        same = inside & (compared.rows[source] == compared.rows)
        found[same] = log_probs[source[same]]
        return found if same.sum() > 0.5 * log_probs.size else None

    return change


def _zeros(compared: Compared, log_probs: Float64) -> Float64 | None:
    zero = (compared.logged == 0) & (log_probs < -_CLEARLY)
    return np.asarray(np.where(zero, 0.0, log_probs)) if zero.any() else None


def _sentinels(compared: Compared, log_probs: Float64) -> Float64 | None:
    """Set apart the values that many tokens share exactly and no replay gives, except the bound of a clamp."""
    values, at, counts = np.unique(compared.logged, return_inverse=True, return_counts=True)
    far = np.abs(compared.logged - log_probs) > 10 * _CLEARLY
    of_value = np.bincount(at, far, values.size)
    above = np.bincount(at, log_probs > compared.logged + _CLEARLY, values.size)
    is_bound = (np.arange(values.size) == 0) & (above < 0.1 * counts)
    suspicious = (counts >= _LEAST_REPEATS) & (of_value >= 0.9 * counts) & (values != 0) & ~is_bound
    marked = suspicious[at] & compared.usable
    if not marked.any() or marked.sum() > (1.0 - _LEAST_LEFT) * compared.usable.sum():
        return None
    return np.asarray(np.where(marked, compared.logged, log_probs))


def _clamped(compared: Compared, log_probs: Float64) -> Float64 | None:
    """Clamp from below at the smallest logged value, if several tokens have it and the replay goes below."""
    usable = compared.logged[compared.usable]
    least = usable.min(initial=0.0)
    if (usable == least).sum() < _LEAST_REPEATS or not (log_probs[compared.usable] < least - _CLEARLY).any():
        return None
    return np.asarray(np.maximum(log_probs, least))


def _scaled(factor: float) -> Callable[[Compared, Float64], Float64 | None]:
    return lambda _, log_probs: log_probs * factor


def _averaged(of: Callable[[Float64, Float64], Float64]) -> Callable[[Compared, Float64], Float64 | None]:
    """Return the change that gives every token one value of its rollout, a function of the sum and of the length."""

    def change(compared: Compared, log_probs: Float64) -> Float64 | None:
        spread = np.abs(np.diff(compared.logged))[np.diff(compared.rows) == 0]
        if not spread.size or np.median(spread) > 1e-6:
            return None
        sums, lengths = (np.asarray(np.bincount(compared.rows, each), np.float64) for each in (log_probs, None))
        return np.asarray(of(sums, np.maximum(lengths, 1.0))[compared.rows])

    return change


def _cumulative(compared: Compared, log_probs: Float64) -> Float64:
    running = np.cumsum(log_probs)
    starts = compared.batch.response_offsets[:-1][compared.rows]
    return np.asarray(running - (running - log_probs)[starts])


def _by_length(compared: Compared, log_probs: Float64) -> Float64:
    return np.asarray(log_probs / np.bincount(compared.rows)[compared.rows])


def _reversed(compared: Compared, log_probs: Float64) -> Float64 | None:
    offsets = compared.batch.response_offsets
    lengths = np.diff(offsets)[compared.rows]
    return np.asarray(log_probs[offsets[:-1][compared.rows] + lengths - 1 - compared.position])


_SHORT, _FEW = 2, 0.1
"""Tokens of a short rollout, and the largest share of all tokens that those have together."""


def _permuted(compared: Compared, log_probs: Float64) -> Float64 | None:
    """Give each rollout the log-probs of the rollout of the same length that its logged ones fit best.

    One or two values fit some rollout of many by chance: so short ones count only if they are few.
    """
    offsets = compared.batch.response_offsets
    lengths, found = np.diff(offsets), log_probs.copy()
    are_few = lengths[lengths <= _SHORT].sum() <= _FEW * lengths.sum()
    for length in np.unique(lengths[lengths > (0 if are_few else _SHORT)]).tolist():
        rows = np.flatnonzero(lengths == length)
        places = offsets[rows][:, None] + np.arange(length)
        distance = np.abs(compared.logged[places][:, None] - log_probs[places][None]).mean(axis=2)
        found[places] = log_probs[places[distance.argmin(axis=1)]]
    return found


def _rounded(compared: Compared, log_probs: Float64) -> Float64 | None:
    if not is_bfloat16(compared.logged[compared.usable]):
        return None
    bits = log_probs.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def _half(compared: Compared, log_probs: Float64) -> Float64 | None:
    """Round to float16 if all logged values are float16 numbers, and not bfloat16 ones."""
    usable = compared.logged[compared.usable]
    is_half = usable.size and (usable == usable.astype(np.float16)).all() and (usable != 0).mean() > 0.5
    return log_probs.astype(np.float16).astype(np.float64) if is_half and not is_bfloat16(usable) else None


def _decimals(number: int) -> Callable[[Compared, Float64], Float64 | None]:
    """Return the change that rounds to decimals, if all logged values are so rounded and not to fewer."""

    def change(compared: Compared, log_probs: Float64) -> Float64 | None:
        usable = compared.logged[compared.usable]
        are = [np.abs(usable - np.round(usable, each)).max(initial=0) < 1e-6 for each in (number, number - 1)]
        return np.asarray(np.round(log_probs, number)) if are == [True, False] else None

    return change


def is_bfloat16(values: Float64) -> bool:
    """Return whether all values are bfloat16 numbers and few of them 0; by chance one float32 in 65,536 is."""
    bits = values.astype(np.float32).view(np.uint32)
    return bool(values.size and not (bits & 0xFFFF).any() and (values != 0).mean() > 0.5)


ROUNDED = ("bfloat16", "float16", *map(str, range(1, 5)))
"""Changes that only a replay in the very precision reproduces: others are rounded to the next step at many tokens."""
DATA_CHANGES: dict[str, Callable[[Compared, Float64], Float64 | None]] = {
    "zeros": _zeros,
    "sentinels": _sentinels,
    "clamp": _clamped,
    "shift-1": shifted(-1),
    "shift+1": shifted(1),
    "shift-2": shifted(-2),
    "shift+2": shifted(2),
    "base2": _scaled(float(1 / np.log(2))),
    "base10": _scaled(float(1 / np.log(10))),
    "means": _averaged(lambda sums, lengths: sums / lengths),
    "sums": _averaged(lambda sums, _: sums),
    "cumulative": _cumulative,
    "by_length": _by_length,
    "reversed": _reversed,
    "permuted": _permuted,
    "bfloat16": _rounded,
    "float16": _half,
    **{str(number): _decimals(number) for number in range(1, 5)},
}
