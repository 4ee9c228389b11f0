"""The token pass as machine code: the sums of `numpy_pass`, several times faster and without the GIL.

It needs numba (the extra `fast`), which only `prepare()` imports. `prepare()` compiles, which takes up to a minute, or
loads the machine code from numba's cache on disk. After that `passes.sum_rollouts` uses this pass. To fill the cache
from another process, run `python -m foreshock.measures.passes.compiled`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.statistics.compensated_sums import CompensatedSums, LogWeights
from foreshock.measures.statistics.conditions import CONDITIONS, BucketSums
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID, BitGrid
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, TOKEN_SUMS, RolloutSums
from foreshock.measures.statistics.tails import LARGEST_VALUES, TAIL_LEVELS, sums_beyond
from foreshock.measures.statistics.token_ids import TokenIdSums

if TYPE_CHECKING:
    from foreshock.measures.passes.loops import Columns, Floats, Integers, Layout, Totals

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
AddRollouts = Callable[..., int]
Scalar = TypeVar("Scalar", bound=np.generic)

_lock = threading.Lock()
_add_rollouts: AddRollouts | None = None

# The conditions whose values change within a rollout, in the order of `Layout.edges`.
_CONDITIONS = ("probability", "entropy", "position", "turn", "lag")
_NO_ROWS = np.zeros(0, np.int64)
# Up to this many rows per token a lookup table by id is cheaper than a search in the sorted ids.
_LOOKUP_ROWS_PER_TOKEN = 32


def available() -> bool:
    """Return True if numba is installed."""
    return importlib.util.find_spec("numba") is not None


def is_prepared() -> bool:
    """Return True if `prepare()` has run in this process."""
    return _add_rollouts is not None


def prepare() -> None:
    """Compile, or load the machine code of an earlier process. One machine code serves all batches.

    Without a writable folder for numba's cache, every process compiles. Raises ImportError without numba.
    """
    _machine_code()


def _machine_code() -> AddRollouts:
    global _add_rollouts
    with _lock:
        if _add_rollouts is None:
            try:
                _add_rollouts = _compile(cached=True)
            except Exception:
                # numba has no writable folder, the disk is full, or a cached file is truncated: its reader then raises
                # exceptions of any type. Compile for this process only; an error in the loops is raised again.
                _add_rollouts = _compile(cached=False)
        return _add_rollouts


def _compile(*, cached: bool) -> AddRollouts:
    """Return the loops as machine code; the first call compiles, for types that all calls share."""
    import numba

    from foreshock.measures.passes.loops import OPTIONS, entry

    constants = zlib.crc32(repr((DPPO_PROBABILITY_GAP, LARGEST_VALUES)).encode())
    made: AddRollouts = numba.njit(cache=cached, **OPTIONS)(entry(constants))
    one = np.full(1, -1.0)
    columns, totals = _columns(TokenInputs(one, one, np.array([0, 1])), _RowsOfIds(None)), _totals(1, 0)
    made(columns, _layout(), totals, True)
    return made


@functools.cache
def _layout() -> Layout:
    """Return the buckets of the loops."""
    from foreshock.measures.passes.loops import Layout

    inner = [np.array(CONDITIONS[name].edges[1:-1]) for name in _CONDITIONS]
    # Edges of log μ, which the loops have read already.
    inner[0] = np.array([math.log(edge) for edge in inner[0]])
    # Edges of log₂(position + 1).
    inner[2] = np.log2(inner[2] + 1)
    edges = np.full((len(inner), -(-max(values.size for values in inner) // 4) * 4), math.inf)
    for row, values in zip(edges, inner, strict=True):
        row[: values.size] = values
    first_tail = 2 * WEIGHT_GRID.size
    probabilities, entropies, *others = (CONDITIONS[name].size for name in _CONDITIONS)
    # Entropy has no buckets of its own.
    sizes = [2 * len(TAIL_LEVELS), probabilities * (entropies + 1), 0, *others]
    first = first_tail + np.cumsum(sizes)
    return Layout(
        fine=_grid(LOG_RATIO_GRID),
        coarse=_grid(WEIGHT_GRID),
        levels=np.array(TAIL_LEVELS),
        first_tail=first_tail,
        first=first[:-1],
        edges=edges,
        entropies=entropies,
        size=int(first[-1]),
    )


def _grid(grid: BitGrid) -> Int64:
    return np.array([52 - grid.bits, ((1023 + grid.lowest) << grid.bits) - 1, grid.size - 1])


def sum_rollouts_compiled(inputs: TokenInputs) -> RolloutSums:
    """Return the sums of each rollout and of all rollouts together, as `sum_rollouts_numpy` does.

    Integers, extremes and largest values equal numpy's; float sums agree to 1e-12 of the sum of absolute values. Raises
    ImportError without numba.
    """
    add, ids = _machine_code(), _RowsOfIds(inputs.token_ids)
    totals, layout = _totals(inputs.offsets.size - 1, ids.ids.size), _layout()
    add(_columns(inputs, ids), layout, totals, True)
    tokens, generated, entropy_tokens, advantage_tokens, turns = totals.counts.T.copy()
    result = RolloutSums(
        tokens=tokens,
        generated=generated,
        sums=totals.sums,
        min_d=totals.ranges[:, 0],
        max_d=totals.ranges[:, 1],
        entropy_tokens=entropy_tokens,
        advantage_tokens=advantage_tokens,
        turns=turns,
        nonfinite_target=int(totals.nonfinite[0]),
        nonfinite_behaviour=int(totals.nonfinite[1]),
        zero_tokens=int(totals.histogram[-1]),
        bad_updates=int(totals.bad_updates[0]),
        max_probability_difference=float(totals.largest_difference[0]),
        histogram=totals.histogram[:-1].reshape(2, -1),
        weight_sums=(totals.high + totals.low)[: layout.first_tail].reshape(2, WEIGHT_GRID.size, -1),
        token_ids=ids.sums(totals.token_ids),
        largest_minus_d=_largest(totals, 0),
        largest_d=_largest(totals, 1),
        token_weights=LogWeights.from_array(int(tokens.sum()), totals.token_weights),
        turn_weights=LogWeights.from_array(int(turns.sum()), totals.turn_weights),
    )
    bucket_tokens = totals.tokens.sum(axis=0)
    largest = totals.largest.max(axis=0)
    tails, of_tails = slice(layout.first_tail, layout.first[0]), (2, len(TAIL_LEVELS), 4)
    between = bucket_tokens[tails].reshape(2, -1)
    result.tail_counts = np.cumsum(between[:, ::-1], axis=1)[:, ::-1].copy()
    result.tail_sums = sums_beyond(
        CompensatedSums(totals.high[tails].reshape(of_tails), totals.low[tails].reshape(of_tails))
    ).value
    for name, first in zip(_CONDITIONS[2:], layout.first[2:].tolist(), strict=True):
        own = slice(first, first + CONDITIONS[name].size)
        sums = CompensatedSums(totals.high[own], totals.low[own])
        result.conditions[name] = BucketSums(bucket_tokens[own], sums, largest[own])
    both, of_both = slice(*layout.first[:2]), (-1, layout.entropies + 1)
    tokens_of_both, largest_of_both = bucket_tokens[both].reshape(of_both), largest[both].reshape(of_both)
    high, low = (each[both].reshape(*of_both, 4) for each in (totals.high, totals.low))
    # Sum each row for the probability, and each column but the last (unknown entropy) for the entropy.
    for name, axis in (("probability", 1), ("entropy", 0)):
        own = slice(CONDITIONS[name].size)
        sums = CompensatedSums.over_first_axis(high.swapaxes(0, axis), low.swapaxes(0, axis))
        result.conditions[name] = BucketSums(
            tokens=tokens_of_both.sum(axis)[own],
            sums=CompensatedSums(sums.high[own], sums.low[own]),
            max_abs_d=largest_of_both.max(axis)[own],
        )
    result.conditions["length"] = result.sums_by_length()
    return result


def _largest(totals: Totals, side: int) -> Float64:
    """Return the largest values of d (side 1) or of −d (side 0), descending."""
    return np.sort(totals.extremes[side, : totals.kept[side]])[::-1][:LARGEST_VALUES].copy()


def _totals(rollouts: int, ids: int) -> Totals:
    """Return empty sums."""
    from foreshock.measures.passes.loops import new_totals

    return new_totals(rollouts, LOG_RATIO_GRID.size, _layout().size, ids)


def _columns(inputs: TokenInputs, ids: _RowsOfIds) -> Columns:
    """Return the columns of the loops; those that are contiguous and of a supported type are not copied."""
    from foreshock.measures.passes.loops import Columns

    advantage = inputs.advantage
    return Columns(
        offsets=_read_only(inputs.offsets, np.int64),
        target=_floats(inputs.target),
        behaviour=_floats(inputs.behaviour),
        generated=_read_only(np.zeros(0) if inputs.generated is None else inputs.generated, np.bool_),
        entropy=_floats(inputs.entropy),
        advantage=_floats(advantage),
        advantage_of_rollout=advantage is not None and advantage.size != inputs.offsets[-1],
        turn=_integers(inputs.turn),
        lag=_integers(inputs.lag),
        token_ids=_integers(ids.column),
        rows_of_ids=_read_only(ids.places, np.int64),
    )


def _floats(values: NDArray[np.floating] | None) -> Floats:
    """Return a column as (float32, float64), one of which is empty."""
    if values is None:
        return _NO_FLOATS
    if values.dtype in (np.float16, np.float32):
        return _read_only(values, np.float32), _NO_FLOATS[1]
    return _NO_FLOATS[0], _read_only(values, np.float64)


def _integers(values: NDArray[np.integer] | None) -> Integers:
    """Return a column as (int32, int64), one of which is empty."""
    if values is None:
        return _NO_INTEGERS
    if values.dtype in (np.int16, np.int32):
        return _read_only(values, np.int32), _NO_INTEGERS[1]
    return _NO_INTEGERS[0], _read_only(values, np.int64)


def _read_only(values: NDArray[Any], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return a contiguous read-only array of this type; to numba a writable array is of another type."""
    view = np.ascontiguousarray(values, dtype).view()
    view.flags.writeable = False
    return view


_NO_FLOATS = _read_only(np.zeros(0), np.float32), _read_only(np.zeros(0), np.float64)
_NO_INTEGERS = _read_only(np.zeros(0), np.int32), _read_only(np.zeros(0), np.int64)


class _RowsOfIds:
    """The rows of token ids in a table; `ids` [V], ascending, are the ids of the rows.

    `places` holds the row of each value of `column`; if it is empty, the values are the rows.
    """

    def __init__(self, token_ids: NDArray[np.integer] | None) -> None:
        self.ids = self.places = _NO_ROWS
        self.column = token_ids
        if token_ids is None or token_ids.size == 0:
            return
        least, most = int(token_ids.min()), int(token_ids.max())
        if least >= 0 and most < token_ids.size:
            self.ids = np.arange(most + 1)
        elif least >= 0 and most < token_ids.size * _LOOKUP_ROWS_PER_TOKEN:
            present = np.zeros(most + 1, np.bool_)
            present[token_ids] = True
            self.ids, self.places = np.flatnonzero(present), np.cumsum(present) - 1
        else:
            self.ids, self.column = np.unique(token_ids, return_inverse=True)
            self.ids = self.ids.astype(np.int64)

    def sums(self, table: Float64) -> TokenIdSums:
        """Return the sums of a table [V, 4] of `Totals`."""
        found = np.flatnonzero(table[:, 0])
        sums = table[found, 1:]
        tokens = table[found, 0].astype(np.int64)
        return TokenIdSums(self.ids[found], tokens, CompensatedSums(sums, np.zeros_like(sums)), np.zeros(found.size))


def compute_verl_metrics(inputs: TokenInputs) -> dict[str, float]:
    """Return verl's thirteen off-policy metrics, several times faster than all measures.

    Keys are the registry's columns: `training_ppl`, `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `kl`,
    `k3_kl`, `log_ppl_diff`, `log_ppl_abs_diff`, `log_ppl_diff_max`, `log_ppl_diff_min`, `ppl_ratio`, `verl_chi2_token`
    and `verl_chi2_seq`, with the values of `ComparisonStatistics.measures()`. Only `target`, `behaviour`, `offsets` and
    `generated` of `inputs` are used. Values are NaN if no token was measured. Raises ImportError without numba.
    """
    bare = TokenInputs(inputs.target, inputs.behaviour, inputs.offsets, inputs.generated)
    totals = _totals(inputs.offsets.size - 1, 0)
    _machine_code()(_columns(bare, _RowsOfIds(None)), _layout(), totals, False)
    measured = totals.counts[:, 0] > 0
    total = float(totals.counts[:, 0].sum())
    sums = dict(zip(TOKEN_SUMS, totals.sums[measured].T, strict=True))
    of_all, k3, above, chi2 = (sums[name] for name in ("d", "k3_kl", "ratio_minus_one", "chi2_token"))
    # Only whole sequences have a ratio.
    whole = (totals.counts[:, 0] == totals.counts[:, 1])[measured]
    tokens, d = totals.counts[measured, 0][whole], of_all[whole]
    log_ppl_diff = -d / tokens
    target, behaviour = (-sums[name][whole] / tokens for name in ("log_target", "log_behaviour"))
    with np.errstate(over="ignore", under="ignore"):
        return {
            "training_ppl": _mean(np.exp(target)),
            "training_log_ppl": _mean(target),
            "rollout_ppl": _mean(np.exp(behaviour)),
            "rollout_log_ppl": _mean(behaviour),
            "kl": -float(of_all.sum()) / total if total else math.nan,
            "k3_kl": float(k3.sum()) / total if total else math.nan,
            "log_ppl_diff": _mean(log_ppl_diff),
            "log_ppl_abs_diff": _mean(np.abs(log_ppl_diff)),
            "log_ppl_diff_max": float(log_ppl_diff.max()) if d.size else math.nan,
            "log_ppl_diff_min": float(log_ppl_diff.min()) if d.size else math.nan,
            "ppl_ratio": 1.0 + _mean(np.expm1(log_ppl_diff)),
            # ρ² − 1 = (ρ − 1)² + 2(ρ − 1)
            "verl_chi2_token": float((chi2 + 2.0 * above).sum()) / total if total else math.nan,
            "verl_chi2_seq": _mean(np.expm1(2.0 * d)),
        }


def _mean(values: Float64) -> float:
    return float(values.mean()) if values.size else math.nan


if __name__ == "__main__":
    prepare()
