"""The token pass as machine code: the sums of `numpy_pass`, several times faster and without the GIL.

It needs numba (the extra `fast`), which only `prepare()` imports. `prepare()` compiles, which takes seconds the first
time, or loads the machine code from numba's cache on disk. After that `passes.sum_rollouts` uses this pass.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.chunks import Chunk, chunks_of, sum_chunks
from foreshock.measures.statistics.bucket_sums import BucketSums
from foreshock.measures.statistics.compensated_sums import CompensatedSums
from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID, BitGrid
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS, RolloutSums
from foreshock.measures.statistics.tails import TAIL_LEVELS, sums_beyond
from foreshock.measures.statistics.token_ids import TokenIdSums

if TYPE_CHECKING:
    from foreshock.measures.passes.loops import Layout, Totals

__all__ = ["available", "compute_verl_metrics", "is_prepared", "prepare", "sum_rollouts_compiled"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
AddRollouts = Callable[..., None]

_lock = threading.Lock()
_add_rollouts: AddRollouts | None = None

# The conditions whose values change within a rollout.
_CONDITIONS = ("probability", "position", "turn", "entropy", "lag")
_NOTHING = np.zeros(0)
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
                # numba has no writable folder, the disk is full, or a cached file is truncated, for which its reader
                # raises exceptions of any type. Compile for this process only; an error in the loops is raised again.
                _add_rollouts = _compile(cached=False)
        return _add_rollouts


def _compile(*, cached: bool) -> AddRollouts:
    """Return the loops as machine code; the first call compiles, for types that all calls share."""
    import numba

    from foreshock.measures.passes import loops

    made: AddRollouts = numba.njit(cache=cached, **loops.ENTRY_OPTIONS)(loops.add_rollouts)
    one = np.full(1, -1.0)
    totals = loops.new_totals(LOG_RATIO_GRID.size, _layout().unknown + 1, 1)
    sums = np.zeros((1, len(loops.SUMS)))
    offsets = np.array([0, 1], np.int64)
    made(offsets, (one,) * 4, (one,) * len(_CONDITIONS), np.zeros(1, np.int64), _layout(), totals, sums, True)
    return made


@functools.cache
def _layout() -> Layout:
    """Return the buckets of the loops."""
    from foreshock.measures.passes.loops import Layout

    inner = [np.array(CONDITIONS[name].edges[1:-1]) for name in _CONDITIONS]
    # Edges of log μ, which the loops have at hand.
    inner[0] = np.array([math.log(edge) for edge in inner[0]])
    edges = np.full((len(inner), -(-max(values.size for values in inner) // 4) * 4), math.inf)
    for row, values in zip(edges, inner, strict=True):
        row[: values.size] = values
    first_tail = 2 * WEIGHT_GRID.size
    sizes = [2 * len(TAIL_LEVELS), *(CONDITIONS[name].size for name in _CONDITIONS)]
    first = first_tail + np.cumsum(sizes)
    return Layout(
        _grid(LOG_RATIO_GRID), _grid(WEIGHT_GRID), np.array(TAIL_LEVELS), first_tail, first[:-1], edges, int(first[-1])
    )


def _grid(grid: BitGrid) -> Int64:
    return np.array([52 - grid.bits, ((1023 + grid.lowest) << grid.bits) - 1, grid.size - 1])


def sum_rollouts_compiled(inputs: TokenInputs) -> RolloutSums:
    """Return the sums of each rollout and of all rollouts together, as `sum_rollouts_numpy` does.

    Integers, extremes and largest values equal numpy's; float sums agree to 1e-12 of the sum of absolute values. Raises
    ImportError without numba.
    """
    return sum_chunks(inputs, _CompiledTotals(inputs.token_ids))


class _CompiledTotals:
    """The sums over all chunks, in the arrays of the loops."""

    def __init__(self, token_ids: NDArray[np.integer] | None) -> None:
        self._add = _machine_code()
        from foreshock.measures.passes.loops import SUMS, new_totals

        self._places = np.array([TOKEN_SUMS.index(name) for name in SUMS])
        self._ids = _RowsOfIds(token_ids)
        self._totals: Totals = new_totals(LOG_RATIO_GRID.size, _layout().unknown + 1, self._ids.ids.size)

    def add(self, result: RolloutSums, chunk: Chunk) -> None:
        sums = np.zeros((chunk.rows.size, self._places.size))
        entropy, advantage = _or_nothing(chunk.entropy), _or_nothing(chunk.advantage)
        values = (
            chunk.behaviour,
            _or_nothing(chunk.positions),
            _or_nothing(chunk.turn),
            entropy,
            _or_nothing(chunk.lag),
        )
        self._add(
            chunk.offsets,
            (chunk.target, chunk.behaviour, entropy, advantage),
            values,
            _NO_ROWS if chunk.token_ids is None else self._ids.of(chunk.token_ids),
            _layout(),
            self._totals,
            sums,
            True,
        )
        result.sums[chunk.rows[:, None], self._places] = sums

    def finish(self, result: RolloutSums) -> None:
        totals, layout = self._totals, _layout()
        sums = CompensatedSums(totals.high, totals.low)
        result.max_probability_difference = float(totals.largest_difference[0])
        result.histogram = totals.histogram[:-1].reshape(2, -1)
        result.zero_tokens = int(totals.histogram[-1])
        result.weight_sums = sums.value[: layout.first_tail].reshape(2, WEIGHT_GRID.size, -1)
        tails = slice(layout.first_tail, layout.first[0])
        between = totals.tokens[tails].reshape(2, -1)
        result.tail_counts = np.cumsum(between[:, ::-1], axis=1)[:, ::-1].copy()
        shape = (2, len(TAIL_LEVELS), 4)
        result.tail_sums = sums_beyond(
            CompensatedSums(totals.high[tails].reshape(shape), totals.low[tails].reshape(shape))
        ).value
        for name, first in zip(_CONDITIONS, layout.first.tolist(), strict=True):
            own = slice(first, first + CONDITIONS[name].size)
            result.conditions[name] = BucketSums(
                totals.tokens[own], CompensatedSums(totals.high[own], totals.low[own]), totals.largest[own]
            )
        result.token_ids = self._ids.sums(totals.token_ids)


def _or_nothing(values: NDArray[Any] | None) -> Float64:
    return _NOTHING if values is None else values.astype(np.float64, copy=False)


class _RowsOfIds:
    """The rows of token ids in a table; `ids` [V], rising, are those of the rows."""

    def __init__(self, token_ids: NDArray[np.integer] | None) -> None:
        self.ids = _NO_ROWS
        # The row of each id; None: to be searched in `ids`.
        self._places: Int64 | None = None
        if token_ids is None or token_ids.size == 0:
            return
        least, most = int(token_ids.min()), int(token_ids.max())
        if least >= 0 and most < token_ids.size:
            self.ids = self._places = np.arange(most + 1)
        elif least >= 0 and most < token_ids.size * _LOOKUP_ROWS_PER_TOKEN:
            present = np.zeros(most + 1, np.bool_)
            present[token_ids] = True
            self.ids, self._places = np.flatnonzero(present), np.cumsum(present) - 1
        else:
            self.ids = np.unique(token_ids).astype(np.int64)

    def of(self, token_ids: NDArray[np.integer]) -> Int64:
        """Return the row of each id."""
        if self._places is self.ids:
            return token_ids.astype(np.int64)
        return np.searchsorted(self.ids, token_ids) if self._places is None else self._places.take(token_ids)

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
    sums, tokens = _sums_of_ratios(inputs)
    d, k3, above, chi2 = (sums[name] for name in ("d", "k3_kl", "ratio_minus_one", "chi2_token"))
    total = float(tokens.sum())
    log_ppl_diff = -d / tokens
    target, behaviour = (-sums[name] / tokens for name in ("log_target", "log_behaviour"))
    with np.errstate(over="ignore", under="ignore"):
        return {
            "training_ppl": _mean(np.exp(target)),
            "training_log_ppl": _mean(target),
            "rollout_ppl": _mean(np.exp(behaviour)),
            "rollout_log_ppl": _mean(behaviour),
            "kl": -float(d.sum()) / total if total else math.nan,
            "k3_kl": float(k3.sum()) / total if total else math.nan,
            "log_ppl_diff": _mean(log_ppl_diff),
            "log_ppl_abs_diff": _mean(np.abs(log_ppl_diff)),
            "log_ppl_diff_max": float(log_ppl_diff.max()) if total else math.nan,
            "log_ppl_diff_min": float(log_ppl_diff.min()) if total else math.nan,
            "ppl_ratio": 1.0 + _mean(np.expm1(log_ppl_diff)),
            # ρ² − 1 = (ρ − 1)² + 2(ρ − 1)
            "verl_chi2_token": float((chi2 + 2.0 * above).sum()) / total if total else math.nan,
            "verl_chi2_seq": _mean(np.expm1(2.0 * d)),
        }


def _sums_of_ratios(inputs: TokenInputs) -> tuple[dict[str, Float64], Int64]:
    """Return the sums of d, ρ and the log-probs of each rollout with measured tokens, and the numbers of those."""
    add = _machine_code()
    from foreshock.measures.passes.loops import SUMS, new_totals

    bare = TokenInputs(inputs.target, inputs.behaviour, inputs.offsets, inputs.generated)
    result = RolloutSums.empty(inputs.offsets.size - 1)
    table = np.zeros((inputs.offsets.size - 1, len(SUMS)))
    totals, nothing = new_totals(LOG_RATIO_GRID.size, 1, 0), (_NOTHING,) * len(_CONDITIONS)
    with np.errstate(over="ignore", invalid="ignore"):
        for chunk in chunks_of(bare, result):
            sums = np.zeros((chunk.rows.size, len(SUMS)))
            columns = (chunk.target, chunk.behaviour, _NOTHING, _NOTHING)
            add(chunk.offsets, columns, nothing, _NO_ROWS, _layout(), totals, sums, False)
            table[chunk.rows] = sums
    measured = result.tokens > 0
    return dict(zip(SUMS, table[measured].T, strict=True)), result.tokens[measured]


def _mean(values: Float64) -> float:
    return float(values.mean()) if values.size else math.nan
